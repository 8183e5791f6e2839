"""`rl replay`: compute a training step again, and compare."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from buckeye import runs
from buckeye.base.storage import step_directories
from buckeye.config.load import load_config
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import UsageError


def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, name or id.")],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute a training step again from the batch that was kept of it, and say where it first differs. Exit
    code 1 if it differs by more than rounding."""
    directory = runs.open(run).path
    if every:
        if step is not None or until is not None:
            raise UsageError("--all computes all steps whole: leave --step and --until out.")
        _replay_all(directory, device, as_json=as_json)
        return
    if step is None:
        raise UsageError("Say which step: `--step N`.")
    config = _trainer_settings(directory)
    from buckeye.analysis.replay.replay_step import replay_step  # imports torch
    from buckeye.analysis.replay.texts import replay_text, replay_to_json

    with tempfile.TemporaryDirectory(prefix="buckeye-replay-") as scratch:
        found = replay_step(
            directory, config, step, until=until or "weights", device=device, scratch=Path(scratch)
        )
    typer.echo(json.dumps(replay_to_json(found)) if as_json else replay_text(found))
    if not found.within_tolerance:
        raise typer.Exit(1)


def _replay_all(directory: Path, device: str | None, *, as_json: bool) -> None:
    config = _trainer_settings(directory)
    from buckeye.analysis.replay.replay_step import replay_all  # imports torch
    from buckeye.analysis.replay.texts import all_text, replay_to_json

    def tell(step: int) -> None:
        if sys.stderr.isatty():
            typer.echo(f"\rstep {step} ", nl=False, err=True)

    with tempfile.TemporaryDirectory(prefix="buckeye-replay-") as scratch:
        found = replay_all(directory, config, device=device, scratch=Path(scratch), tell=tell)
    kept = list(step_directories(directory / "trained"))
    typer.echo(json.dumps(replay_to_json(found)) if as_json else all_text(found, kept))
    if found.first_unexplained is not None or found.step < kept[-1]:
        raise typer.Exit(1)


def _trainer_settings(directory: Path) -> TrainerConfig:
    return load_config(TrainerConfig, ["@", str(directory / "configs" / "trainer.json")])


COMMANDS = {"rl replay": replay}
