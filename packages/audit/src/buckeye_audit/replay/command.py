"""`rl replay`, `rl bundle` and `rl bisect`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from buckeye.base.disk import human_bytes
from buckeye.base.storage import step_directories
from buckeye.config.load import load_config
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import UsageError
from buckeye.run_files.known_runs import find_run
from buckeye_audit.curve import metric_values
from buckeye_audit.replay.bundle import opened, trainer_settings, write_bundle

_Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, name or id, or a bundle.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def replay(
    run: _Run,
    step: Annotated[int | None, typer.Option(min=0, help="Which step, as the log counts them.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All steps that were kept, up to the first that differs.")
    ] = False,
    until: Annotated[
        Literal["log-probs", "loss", "gradient", "weights"] | None,
        typer.Option(
            help="How far. All but `weights` need the weights of the step alone. Default: as far as can be."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Another device, as cpu.")] = None,
    as_json: _Json = False,
) -> None:
    """Compute a training step again from the batch that was kept of it, and say where it first differs. Exit
    code 1 if it differs by more than rounding."""
    with opened(run) as (directory, bundled):
        if every:
            if step is not None or until is not None:
                raise UsageError("--all computes all steps whole: leave --step and --until out.")
            _replay_all(directory, device, as_json=as_json)
            return
        if bundled is not None:
            step, until = bundled.step if step is None else step, until or bundled.until
        if step is None:
            raise UsageError("Say which step: `--step N`.")
        config = trainer_settings(directory)
        from buckeye_audit.replay.step import replay_step  # brings torch
        from buckeye_audit.replay.texts import replay_object, replay_text

        with tempfile.TemporaryDirectory(prefix="buckeye-replay-") as scratch:
            found = replay_step(
                directory, config, step, until=until or "weights", device=device, scratch=Path(scratch)
            )
        typer.echo(json.dumps(replay_object(found)) if as_json else replay_text(found))
    if not found.within_tolerance:
        raise typer.Exit(1)


def _replay_all(directory: Path, device: str | None, *, as_json: bool) -> None:
    config = trainer_settings(directory)
    from buckeye_audit.replay.step import replay_all  # brings torch
    from buckeye_audit.replay.texts import all_text, replay_object

    def tell(step: int) -> None:
        if sys.stderr.isatty():
            typer.echo(f"\rstep {step} ", nl=False, err=True)

    with tempfile.TemporaryDirectory(prefix="buckeye-replay-") as scratch:
        found = replay_all(directory, config, device=device, scratch=Path(scratch), tell=tell)
    kept = list(step_directories(directory / "trained"))
    typer.echo(json.dumps(replay_object(found)) if as_json else all_text(found, kept))
    if found.first_unexplained is not None or found.step < kept[-1]:
        raise typer.Exit(1)


def bisect(
    run: _Run,
    good: Annotated[
        int | None,
        typer.Option(min=0, help="The last step known to be right. Default: of those kept none is."),
    ] = None,
    bad: Annotated[
        int | None, typer.Option(min=0, help="A step known to be wrong. Default: the last that was kept.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Compute only the step where this number departs, as `rl curve` names it."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="KEY=VALUE", help="Another setting, as trainer.optim.lr=1e-5."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Find the first step between a good and a bad one at which this code, or other settings, compute
    something else than was recorded, and the stage. Exit code 1 if there is one."""
    with opened(run) as (directory, _), tempfile.TemporaryDirectory(prefix="buckeye-bisect-") as scratch:
        trainer, orchestrator = (_flags(role, changes or []) for role in ("trainer", "orchestrator"))
        config = trainer_settings(directory, trainer)
        from buckeye_audit.replay.bisect import departure, search_of  # bring torch
        from buckeye_audit.replay.texts import search_object, search_text

        search = search_of(directory, config, orchestrator, Path(scratch))
        last = search.kept[-1] if bad is None else bad
        before = search.kept[0] - 1 if good is None else good
        if before >= last:
            raise UsageError(f"--good {before} is not before {'step' if bad is None else '--bad'} {last}.")
        if metric is None:
            search.between(before, last)
        else:
            search.only(departure(metric_values(directory, metric), max(before, 0), last))
        typer.echo(json.dumps(search_object(search)) if as_json else search_text(search, before, last))
    if search.found is not None and search.found.first_unexplained is not None:
        raise typer.Exit(1)


def _flags(role: str, changes: list[str]) -> list[str]:
    """The flags for the settings of a process. Raises UsageError for what is none of either."""
    for change in changes:
        if "=" not in change or change.partition(".")[0] not in ("trainer", "orchestrator"):
            raise UsageError(
                f"--with {change}: a setting is written as trainer.NAME=VALUE or orchestrator.NAME=VALUE."
            )
    return [f"--{change.partition('.')[2]}" for change in changes if change.partition(".")[0] == role]


def bundle(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, name or id.")],
    step: Annotated[int, typer.Option(min=0, help="Which step, as the log counts them.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A new file. Default: RUN-step-N.zip, here.")
    ] = None,
    max_mb: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Megabytes before compression; weights go first.")
    ] = 100,
    as_json: _Json = False,
) -> None:
    """Make one file of a step, for a bug report: what `rl replay` and `rl diagnose` need, without keys."""
    directory = find_run(run)
    target = out or Path(f"{directory.resolve().name}-step-{step}.zip")
    config = load_config(TrainerConfig, ["@", str(directory / "configs" / "trainer.json")])
    made = write_bundle(directory, config, step, target, max_bytes=max_mb * 1_000_000)
    if as_json:
        typer.echo(json.dumps({"file": str(target), **msgspec.to_builtins(made)}))
        return
    typer.echo(
        f"{target}: {human_bytes(target.stat().st_size)}, {len(made.files)} files, to be replayed as "
        f"far as {made.until or 'nothing'}"
    )
    for line in made.left_out:
        typer.echo(f"not in it: {line}")
    typer.echo("It holds prompts and replies of the run: look at them before you give it away.")
    typer.echo(f"  buckeye rl replay {target}")
