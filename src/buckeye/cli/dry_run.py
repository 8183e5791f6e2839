"""`rl --dry-run`: show the plan of a run, or its resolved configuration, and the problems of a start.

A dry run writes nothing and needs no network and no GPU. For a remote machine, it requests offers from the
provider and versions from the package index, if provider and index are reachable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from buckeye.base.columns import align_columns
from buckeye.config.load import to_json
from buckeye.config.rl import RLConfig
from buckeye.errors import BuckeyeError, UsageError
from buckeye.launch.plan import RolePlan, make_plan
from buckeye.launch.preflight.devices import this_machine
from buckeye.launch.preflight.disk import disk_table
from buckeye.launch.preflight.doctor import PreflightContext, run_preflight_checks
from buckeye.launch.preflight.memory_check import MEMORY
from buckeye.launch.preflight.ports import UnassignedPorts
from buckeye.launch.preflight.trainer_forecast import FORECAST
from buckeye.launch.preflight.turns import TURNS, choose_colocation
from buckeye.launch.resume import find_run_origin, resume_hint
from buckeye.run_files.directory import check_unused

_CHILD_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "UV_NO_CACHE": "1",
}


@dataclass(frozen=True, slots=True)
class DryRun:
    """Result of a dry run: the plan as text, errors that would prevent a start, and warnings.

    `codes` are the codes of errors that `buckeye explain` explains.
    """

    text: str
    errors: Sequence[str]
    warnings: Sequence[str]
    codes: Sequence[str] = ()


def describe_run(config: RLConfig, command: Sequence[str], *, as_json: bool = False) -> DryRun:
    """Return the plan of a run on this machine. With `as_json`, its text is the resolved configuration."""
    config = choose_colocation(config, this_machine().gpus)
    context = PreflightContext(config=config)
    checks = run_preflight_checks(context, "dry run")
    plan = _make_plan(config, context.usable_model)
    failed = [check for check in checks if check.state == "failed" and check.name != MEMORY]
    errors = [check.line for check in failed]
    codes = [check.code for check in failed if check.code != "BK-PREFLIGHT"]
    forecasts = [check.line for check in checks if check.name in (TURNS, FORECAST)]
    shown = {*errors, *forecasts}
    warnings = [check.line for check in checks if check.state != "ok" and check.line not in shown]
    text = "\n\n".join([plan_table(plan, config.output_dir), disk_table(config, plan.disk), *forecasts])
    return DryRun(
        to_json(config) if as_json else text, [*errors, *_directory_errors(config, command)], warnings, codes
    )


def _make_plan(config: RLConfig, model_path: Path | None) -> RolePlan:
    """Plan the run as if all its GPUs were present; a separate check reports missing GPUs."""
    machine, ports = this_machine(), UnassignedPorts()
    try:
        return make_plan(config, machine, model_path=model_path, ports=ports)
    except UsageError:
        inference_ids = config.inference_gpu_ids if config.inference is not None else []
        gpu_ids = tuple(sorted({*inference_ids, *config.trainer_gpu_ids}))
        return make_plan(config, replace(machine, gpus=gpu_ids), model_path=model_path, ports=ports)


def plan_table(plan: RolePlan, output_dir: Path) -> str:
    """Return the processes of a plan as aligned text."""
    device = "GPU" if plan.on_gpu else "CPU slot"
    has_nodes = any(role.node for role in plan.roles)
    rows: list[tuple[str, ...]] = [("process", *(("node",) if has_nodes else ()), "devices", "port", "log")]
    for role in plan.roles:
        rows.append(
            (
                role.title,
                *((str(role.node),) if has_nodes else ()),
                f"{device} {','.join(map(str, role.devices))}" if role.devices else "-",
                "-" if role.port is None else str(role.port or "any free"),
                str(output_dir / "logs" / role.stdout_name),
            )
        )
    return align_columns(rows)


def _directory_errors(config: RLConfig, command: Sequence[str]) -> list[str]:
    try:
        if not find_run_origin(config).is_resume and not config.clean:
            check_unused(config.output_dir, resume_command=resume_hint(config, command))
    except BuckeyeError as error:
        return [str(error)]
    return []


def run_or_show(config: RLConfig, *, show: Callable[[], int], start: Callable[[], int]) -> int:
    """Call `start`, or with --dry-run only `show`; return the exit code."""
    if not config.dry_run:
        return start()
    with leave_no_files():
        code = show()
    print("Nothing was written or started.", file=sys.stderr)
    return code


def print_dry_run(result: DryRun) -> int:
    """Print the plan on stdout and its problems on stderr. Return the exit code: 2 if a start would fail."""
    print(result.text)
    return print_problems(result)


def print_problems(result: DryRun) -> int:
    """Print errors and warnings on stderr. Return the exit code: 2 if a start would fail."""
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for error in result.errors:
        print(f"error: {error}", file=sys.stderr)
    for code in dict.fromkeys(result.codes):
        print(f"more: buckeye explain {code}", file=sys.stderr)
    return 2 if result.errors else 0


@contextmanager
def leave_no_files() -> Iterator[None]:
    """Run the block without leaving files.

    Python writes no bytecode, and the Hugging Face libraries and uv write nothing into their caches.
    """
    bytecode, variables = sys.dont_write_bytecode, dict(os.environ)
    offline = _set_offline(True)
    sys.dont_write_bytecode = True
    os.environ.update(_CHILD_VARIABLES)
    try:
        yield
    finally:
        sys.dont_write_bytecode = bytecode
        for name in _CHILD_VARIABLES:
            os.environ.pop(name)
        os.environ.update({name: variables[name] for name in _CHILD_VARIABLES if name in variables})
        _set_offline(offline)


def _set_offline(value: bool) -> bool:
    """Set the offline flag of `huggingface_hub`; return the old value.

    The library reads the variable HF_HUB_OFFLINE only when it is imported.
    """
    constants = sys.modules.get("huggingface_hub.constants")
    before = bool(getattr(constants, "HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE") == "1"))
    if constants is not None:
        constants.HF_HUB_OFFLINE = value  # type: ignore[attr-defined]
    return before
