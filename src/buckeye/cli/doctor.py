"""`rl doctor [CONFIG ...]`: check the machine and a configuration before anything is started."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated

import typer

from buckeye import runs
from buckeye.base.columns import counted
from buckeye.base.terminal import status_line, stdout_kept
from buckeye.cli.dry_run import leave_no_files
from buckeye.cli.load import load
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.evaluation import doctor_checks
from buckeye.launch.preflight.check import Check
from buckeye.launch.preflight.devices import this_machine
from buckeye.launch.preflight.doctor import (
    CHECKS,
    Occasion,
    PreflightCheck,
    PreflightContext,
    run_preflight_checks,
)
from buckeye.launch.preflight.turns import choose_colocation

_WIDTH_WITHOUT_TERMINAL = 110
_MAX_SIMULATION_ERROR = 0.2


def doctor(
    context: typer.Context,
    sample: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Also run N groups of every environment with the model."),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Use no network; fail for everything that a run would download.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    simulate: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Only simulate a run with more engines or more steps ahead."),
    ] = None,
) -> int:
    """Check this machine, and whether a run with this configuration would work on it.

    CONFIG consists of files and flags as for `rl`: `@ file.toml`, `--trainer @ train.toml`. Without CONFIG,
    only the machine is checked. The exit code is 1 if a check failed; warnings do not count.
    """
    if offline and sample:
        hint = "Run `rl doctor --offline` first"
        raise UsageError("--offline runs no rollouts (--sample)", code="BK-CLI-CONFLICT", hint=hint)
    if simulate is not None:
        if context.args or sample or offline:
            message = "--simulate RUN checks nothing, and takes no configuration"
            raise UsageError(message, code="BK-CLI-CONFLICT", hint="Leave the other arguments out")
        print(_simulate(simulate, as_json=as_json))
        return 0
    config = load(RLConfig, context.args, "rl doctor") if context.args else None
    if config is not None and config.dry_run:
        message = "`rl doctor`: does not accept --dry-run"
        raise UsageError(
            message, code="BK-CLI-CONFLICT", hint="Leave --dry-run out; `rl doctor` starts no run"
        )
    if sample and config is None:
        message = "`rl doctor --sample N`: needs a configuration with a model"
        raise UsageError(
            message, code="BK-CLI-MISSING", hint="Add a configuration, as for `rl`: `@ run.toml`"
        )
    if config is not None:
        config = choose_colocation(config, this_machine().gpus)
    fetch = shlex.join(["buckeye", "fetch", *context.args]) if offline else ""
    with (
        status_line("checking the machine") as progress,
        leave_no_files() if offline else nullcontext(),
        stdout_kept(for_json=as_json),
    ):
        preflight = PreflightContext(config=config, sample=sample or 0, progress=progress, fetch=fetch)
        checks = run_preflight_checks(preflight, *_checks(offline=offline))
    if as_json:
        print(json.dumps([asdict(check) for check in checks], ensure_ascii=False))
    else:
        print(doctor_text(checks, width=_width()))
    return 1 if any(check.state == "failed" for check in checks) else 0


def _checks(*, offline: bool) -> tuple[Occasion, Sequence[PreflightCheck]]:
    return ("offline", CHECKS) if offline else ("doctor", [*CHECKS, *doctor_checks.CHECKS])


def doctor_text(checks: Sequence[Check], *, width: int) -> str:
    """Return the checks as text: each result with its remedy and details, then the totals."""
    name_width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        start = f"{check.state:<8}{check.name:<{name_width}}  "
        lines += _wrap(start, check.seen, width)
        if check.do:
            lines += _wrap(" " * len(start), f"-> {check.do}", width)
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


def _simulate(run: str, *, as_json: bool) -> str:
    """Return the recorded seconds per step of a run, and those of other layouts by simulation."""
    from buckeye.evaluation.layouts import simulate_layouts

    with status_line("simulating other layouts"):
        recorded, layouts = simulate_layouts(runs.open(run).path)
    if as_json:
        rows = [
            {"engines": n, "max_async_level": level, **asdict(found)} for (n, level), found in layouts.items()
        ]
        return json.dumps({"recorded_step_seconds": recorded, "layouts": rows})
    base = next(iter(layouts.values())).step_seconds
    lines = [f"recorded   {recorded:7.2f} s a step"]
    lines += [
        f"simulated  {found.step_seconds:7.2f} s a step, {base / found.step_seconds:.2f} times as fast: "
        f"{counted(engines, 'engine')} (idle {found.engine_idle:.0%}), max_async_level {level}, "
        f"trainer idle {found.trainer_idle:.0%}, {found.dropped:.0%} of groups dropped"
        for (engines, level), found in layouts.items()
    ]
    error = base / recorded - 1 if recorded else 0.0
    if abs(error) > _MAX_SIMULATION_ERROR:
        lines.append(
            f"warning: the simulation of the recorded layout is {error:+.0%} off, as on a busy machine: do "
            "not rely on it"
        )
    return "\n".join(lines)


def _wrap(start: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        max(width, len(start) + 40),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
