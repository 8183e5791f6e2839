"""`buckeye rl tune`: its flags and its output."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import NoReturn

from buckeye.base.json_lines import printable
from buckeye.cli.help import show_page
from buckeye.cli.load import load
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError

_WHAT = """\
Finds a learning rate for a run by short forks of it: first by how far rates move the policy in a step, on the
batches of one fork that trains nothing, then by the rewards of forks that train. CONFIG is what `rl` takes:
`@ run.toml`, flags. The setting is written into a new file, which nothing else reads. Exit code 1: there was
nothing to learn from."""
_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


_OPTIONS = (
    ("--budget TIME", "As 90s, 10m or 1h: about how long. (default 10m)"),
    ("-o, --output DIR", "A new folder. (default OUTPUT_DIR-tune)"),
    ("--json", "Print one JSON object."),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"`rl tune`: {message}. `rl tune --help` explains it")

    def print_help(self, file: object = None) -> None:
        show_page("usage: rl tune CONFIG ... [OPTIONS]", _WHAT, {"Options": _OPTIONS})


def tune(argv: list[str]) -> int:
    """Find a learning rate and print it; return the exit code."""
    flags, settings = _parser().parse_known_args(argv)
    if not settings:
        raise UsageError("`rl tune` needs a configuration, as `rl` takes it: buckeye rl tune @ run.toml")
    config = load(RLConfig, settings, "rl tune")
    if config.dry_run or config.resume or config.clean:
        raise UsageError("`rl tune` makes runs of its own: leave --dry-run, --resume and --clean out")
    from buckeye.base.distribution import need
    from buckeye.base.process import idle_spins

    need("torch", "Tuning")
    os.environ["GOMP_SPINCOUNT"] = idle_spins(cores_to_itself=False)  # read when torch is imported
    from buckeye.setup.tuning.tune import Tuning

    out = config.output_dir.absolute()
    found = Tuning(
        config=config,
        root=(flags.output or out.with_name(f"{out.name}-tune")).absolute(),
        budget=flags.budget,
        tell=lambda line: print(printable(line), file=sys.stderr, flush=True),
    ).run()
    if flags.json:
        print(json.dumps(dataclasses.asdict(found)))
        return 0
    how = "is where forks earned most"
    if not found.by_training:
        how = "moves the policy as far as is usual; no fork has shown that it learns"
    print(f"lr {found.lr:.2e} {how}.")
    end = (
        ""
        if found.reward_at_end is None
        else f", {found.reward_at_end:.3g} in the last quarter of the best fork"
    )
    print(f"Mean reward: {found.reward_at_start:.3g} before training{end}.")
    print(f"To train with it: {shlex.join(['buckeye', 'rl', *settings, '@', found.file])}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("rl tune", allow_abbrev=False)
    parser.add_argument("--budget", type=_seconds, default="10m")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--json", action="store_true")
    return parser


def _seconds(text: str) -> float:
    found = _TIME.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time, such as 90s, 10m or 1h")
    return float(found[1]) * _SECONDS[found[2]]


COMMANDS = {"rl tune": tune}
