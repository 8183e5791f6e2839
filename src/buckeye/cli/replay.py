"""`rl replay`: recompute a training step, and compare the result with the recorded one."""

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
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run directory, name or id.")],
    step: Annotated[int | None, typer.Option(min=0, help="Step, as in the log.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Recompute all recorded steps, up to the first that differs.")
    ] = False,
    until: Annotated[
        Literal["log-probs", "loss", "gradient", "weights"] | None,
        typer.Option(help="Last stage to compute. Default: the last one that the files allow."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device, such as cpu. Default: the device of the run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Recompute a training step from its recorded batch, and report the first difference.

    The exit code is 1 if a value differs by more than rounding.
    """
    directory = runs.open(run).path
    if every:
        if step is not None or until is not None:
            hint = "Leave --step and --until out"
            raise UsageError("--all recomputes complete steps", code="BK-CLI-CONFLICT", hint=hint)
        _replay_all(directory, device, as_json=as_json)
        return
    if step is None:
        raise UsageError("--step is missing", code="BK-CLI-MISSING", hint="Add --step N, or --all")
    config = _trainer_settings(directory)
    from buckeye.analysis.replay.start import find_start, require_kept  # imports safetensors

    require_kept(directory, step)
    if until in (None, "weights"):
        find_start(directory, config, step)  # fails before torch is imported
    from buckeye.analysis.replay.replay_step import replay_step  # imports torch
    from buckeye.analysis.replay.texts import replay_text, replay_to_json

    with tempfile.TemporaryDirectory(prefix="buckeye-replay-") as scratch:
        result = replay_step(
            directory, config, step, until=until or "weights", device=device, scratch=Path(scratch)
        )
    typer.echo(json.dumps(replay_to_json(result)) if as_json else replay_text(result))
    if not result.within_tolerance:
        raise typer.Exit(1)


def _replay_all(directory: Path, device: str | None, *, as_json: bool) -> None:
    config = _trainer_settings(directory)
    from buckeye.analysis.replay.replay_step import replay_all  # imports torch
    from buckeye.analysis.replay.texts import full_replay_text, replay_to_json

    def show_progress(step: int) -> None:
        if sys.stderr.isatty():
            typer.echo(f"\rstep {step} ", nl=False, err=True)

    with tempfile.TemporaryDirectory(prefix="buckeye-replay-") as scratch:
        result = replay_all(directory, config, device=device, scratch=Path(scratch), tell=show_progress)
    kept_steps = list(step_directories(directory / "trained"))
    typer.echo(json.dumps(replay_to_json(result)) if as_json else full_replay_text(result, kept_steps))
    if result.first_unexplained is not None or result.step < kept_steps[-1]:
        raise typer.Exit(1)


def _trainer_settings(directory: Path) -> TrainerConfig:
    return load_config(TrainerConfig, ["@", str(directory / "configs" / "trainer.json")])
