"""`buckeye rl tune`: find a learning rate."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from buckeye.base.columns import counted
from buckeye.base.json_lines import printable
from buckeye.cli.env_options import parse_seconds
from buckeye.cli.load import load
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError


def tune(
    context: typer.Context,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Approximate time, such as 90s, 10m or 1h.")
    ] = "10m",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="New folder. Default: OUTPUT_DIR-tune."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find a learning rate with short forks of a run.

    The first fork collects batches without training. They show how much each learning rate changes the
    policy per step. Further forks train, and their rewards decide. CONFIG consists of files and flags as for
    `rl`: `@ run.toml`. Writes the learning rate to a new file. The exit code is 1 if the first fork fails.
    """
    settings, seconds = context.args, parse_seconds(budget)
    if not settings:
        hint = "Add one, as for `rl`: `buckeye rl tune @ run.toml`"
        raise UsageError("`rl tune`: the configuration is missing", code="BK-CLI-MISSING", hint=hint)
    config = load(RLConfig, settings, "rl tune")
    if config.dry_run or config.resume or config.clean:
        message = "`rl tune`: does not accept --dry-run, --resume and --clean"
        raise UsageError(message, code="BK-CLI-CONFLICT", hint="Leave them out; every fork is a new run")
    from buckeye.base.distribution import need
    from buckeye.base.process import idle_spins

    need("torch", "Tuning")
    os.environ["GOMP_SPINCOUNT"] = idle_spins(cores_to_itself=False)  # read when torch is imported
    from buckeye.setup.tuning.tune import Tuning

    out = config.output_dir.absolute()
    result = Tuning(
        config=config,
        root=(output or out.with_name(f"{out.name}-tune")).absolute(),
        budget=seconds,
        tell=lambda line: print(printable(line), file=sys.stderr, flush=True),
    ).run()
    if as_json:
        print(json.dumps(dataclasses.asdict(result)))
        return
    reason = "highest reward of the forks"
    forks = counted(len(result.forks), "fork")
    if not result.by_training:
        learned = "no fork learned significantly" if result.forks else "no fork was trained"
        tried = counted(len(result.changes), "tried rate")
        reason = f"nearest of {tried} to the usual policy change per step; {learned}"
    print(f"lr {result.lr:.2e}: {reason}")
    if result.enough_budget is not None:
        enough = _budget_text(result.enough_budget)
        print(
            f"The budget of {budget} was too small to compare rates ({forks} trained): use --budget {enough}"
        )
    end = ""
    if result.reward_at_end is not None:
        end = f", {result.reward_at_end:.3g} in the last quarter of the best fork"
    print(f"Mean reward: {result.reward_at_start:.3g} before training{end}.")
    print(f"To train with it: {shlex.join(['buckeye', 'rl', *settings, '@', result.file])}")


def _budget_text(seconds: float) -> str:
    """Return a budget, rounded up to whole minutes, or to tens of seconds below two minutes."""
    return f"{math.ceil(seconds / 60)}m" if seconds > 120 else f"{10 * math.ceil(seconds / 10)}s"
