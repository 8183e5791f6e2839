"""`rl doctor [CONFIG]`: check the machine and a configuration before anything is started."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from buckeye.base.columns import counted
from buckeye.base.terminal import status_line
from buckeye.cli.load import load
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.evaluation import doctor_checks
from buckeye.launch.preflight.check import Check
from buckeye.launch.preflight.doctor import CHECKS, PreflightContext, run_preflight_checks

HELP = """\
usage: rl doctor [CONFIG ...] [--sample N] [--json]

Looks at this machine, and at whether a run with this configuration would work here. CONFIG is what `rl`
takes: `@ file.toml`, `--trainer @ train.toml`, flags. Without it only the machine is looked at.

  --sample N   also play N groups of every environment with the model: is there something to learn?
  --json       print JSON

Exit code 0 if nothing has failed (warnings do not count), 1 if something has, 2 for wrong usage."""

_PAPER_WIDTH = 110


def doctor(words: list[str]) -> int:
    """Run the checks and print them; return the exit code."""
    if "--help" in words or "-h" in words:
        print(HELP)
        return 0
    rest, as_json, sample = _own_flags(words)
    config = load(RLConfig, rest, "rl doctor") if rest else None
    if config is not None and config.dry_run:
        raise UsageError("`rl doctor` starts no run, but plays what it examines: leave --dry-run out")
    if sample and config is None:
        raise UsageError("`rl doctor --sample` plays with the model of a configuration; give one, as to `rl`")
    with status_line("examining the machine") as progress:
        examination = PreflightContext(config=config, sample=sample, progress=progress)
        checks = run_preflight_checks(examination, "doctor", [*CHECKS, *doctor_checks.CHECKS])
    if as_json:
        print(json.dumps([asdict(check) for check in checks], ensure_ascii=False))
    else:
        print(doctor_text(checks, width=_width()))
    return 1 if any(check.state == "failed" for check in checks) else 0


def doctor_text(checks: Sequence[Check], *, width: int) -> str:
    """Return the checks as text: results, remedies, figures of memory and of problems, and totals."""
    name_width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        start = f"{check.state:<8}{check.name:<{name_width}}  "
        lines += _wrapped(start, check.seen, width)
        if check.do:
            lines += _wrapped(" " * len(start), f"-> {check.do}", width)
        if check.lines and (check.state in ("warning", "failed") or check.name in ("memory", "disk")):
            lines += [" " * 10 + line for line in check.lines]
    count = {
        state: sum(check.state == state for check in checks) for state in ("failed", "warning", "skipped")
    }
    lines.append(
        f"\n{counted(len(checks), 'check')}: {count['failed']} failed, "
        f"{counted(count['warning'], 'warning')}, "
        f"{count['skipped']} skipped"
    )
    return "\n".join(lines)


def _wrapped(start: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        max(width, len(start) + 40),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _own_flags(words: Sequence[str]) -> tuple[list[str], bool, int]:
    """Return the args of the configuration, True if `--json` was given, and the value of `--sample`."""
    rest, sample = [], 0
    pending = iter(words)
    for word in pending:
        name, equals, value = word.partition("=")
        if name == "--sample":
            given = value if equals else next(pending, "")
            if not given.isdigit() or int(given) < 1:
                raise UsageError(f"`rl doctor --sample`: {given!r} is not a number of groups, such as 8")
            sample = int(given)
        elif word != "--json":
            rest.append(word)
    return rest, "--json" in words, sample


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _PAPER_WIDTH


COMMANDS = {"rl doctor": doctor}
