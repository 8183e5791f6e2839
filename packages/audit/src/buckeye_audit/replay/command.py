"""`rl replay`, `rl bundle` and `rl bisect`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from buckeye.base.disk import human_bytes
from buckeye.config.load import load_config
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import UsageError
from buckeye.run_files.known_runs import find_run
from buckeye_audit.replay.bundle import opened, trainer_settings, write_bundle

_Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, name or id, or a bundle.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def replay(
    run: _Run,
    step: Annotated[int | None, typer.Option(min=0, help="Which step, as the log counts them.")] = None,
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
        if bundled is not None:
            step, until = bundled.step if step is None else step, until or bundled.until
        if step is None:
            raise UsageError("Say which step: `--step N`.")
        config = trainer_settings(directory)
        from buckeye_audit.replay.step import replay_step  # brings torch
        from buckeye_audit.replay.texts import replay_json, replay_text

        with tempfile.TemporaryDirectory(prefix="buckeye-replay-") as scratch:
            found = replay_step(
                directory, config, step, until=until or "weights", device=device, scratch=Path(scratch)
            )
        typer.echo(replay_json(found) if as_json else replay_text(found))
    if not found.within_tolerance:
        raise typer.Exit(1)


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
