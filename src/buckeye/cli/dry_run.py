"""`rl --dry-run`: whether a run is started or only shown; the plan, the resolved configuration, and warnings
about what a real start would need.

Writes nothing, needs no network and no GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from buckeye.base.columns import aligned
from buckeye.config.load import to_json
from buckeye.config.rl import RLConfig
from buckeye.errors import BuckeyeError, UsageError
from buckeye.launch.resume import beginning, resume_command
from buckeye.monitor.tracker import check_trackers
from buckeye.run_files.directory import refuse_used
from buckeye.sizing.devices import Machine, slots_instead, this_machine
from buckeye.sizing.disk import disk_shortage, disk_table, disk_warning
from buckeye.sizing.doctor import reference_warnings, trainer_warnings
from buckeye.sizing.model import find_model
from buckeye.sizing.plan import RolePlan, make_plan
from buckeye.sizing.ports import AnyPorts
from buckeye.sizing.tasks import check_tasks


def describe(config: RLConfig, command: Sequence[str]) -> tuple[str, list[str]]:
    """The text to print and the warnings of a dry run."""
    model_path = find_model(config.trainer.model.name)
    plan, warnings = _plan(config, model_path)
    slots = None if plan.on_gpu else slots_instead(config, this_machine().gpus)
    warnings += [slots] if slots is not None else []
    warnings += _model_warnings(config, model_path)
    warnings += trainer_warnings(config, model_path, on_gpu=plan.on_gpu)
    warnings += reference_warnings(config.trainer.loss)
    warnings += _task_warnings(config, model_path)
    warnings += _directory_warnings(config, command)
    warnings += _disk_warnings(config, plan)
    warnings += _tracker_warnings(config)
    tables = f"{plan_table(plan, config.output_dir)}\n\n{disk_table(config, plan.disk)}"
    return f"{tables}\n\n{to_json(config)}", warnings


def _plan(config: RLConfig, model_path: Path | None) -> tuple[RolePlan, list[str]]:
    machine, ports = this_machine(), AnyPorts()
    try:
        return make_plan(config, machine, model_path=model_path, ports=ports), []
    except UsageError as error:  # devices that are not here: plan as if they were, and say so
        inference_ids = config.inference_gpu_ids if config.inference is not None else []
        asked = tuple(sorted({*inference_ids, *config.trainer_gpu_ids}))
        pretended: Machine = replace(machine, gpus=asked)
        return make_plan(config, pretended, model_path=model_path, ports=ports), [str(error)]


def _tracker_warnings(config: RLConfig) -> list[str]:
    try:
        check_trackers(config.trackers(config.trainer.wandb))
    except UsageError as error:
        return [str(error)]
    return []


def plan_table(plan: RolePlan, output_dir: Path) -> str:
    """The processes of a plan as aligned plain text."""
    device = "GPU" if plan.on_gpu else "CPU slot"
    several = any(role.node for role in plan.roles)
    rows: list[tuple[str, ...]] = [("process", *(("node",) if several else ()), "devices", "port", "log")]
    for role in plan.roles:
        rows.append(
            (
                role.title,
                *((str(role.node),) if several else ()),
                f"{device} {','.join(map(str, role.devices))}" if role.devices else "-",
                "-" if role.port is None else str(role.port or "a free one"),
                str(output_dir / "logs" / f"{role.log_name}.stdout"),
            )
        )
    return aligned(rows)


def _model_warnings(config: RLConfig, model_path: Path | None) -> list[str]:
    if model_path is not None:
        return []
    name = config.trainer.model.name
    return [
        f"the weights of {name} are not on this machine; a start would fetch them from the Hugging Face hub"
    ]


def _task_warnings(config: RLConfig, model_path: Path | None) -> list[str]:
    found = [check for check in check_tasks(config, model_path) if check.state != "ok"]
    return [f"{check.name}: {check.seen}" for check in found]


def _directory_warnings(config: RLConfig, command: Sequence[str]) -> list[str]:
    try:
        if not beginning(config).again and not config.clean:
            refuse_used(config.output_dir, resume_command=resume_command(command))
    except BuckeyeError as error:
        return [str(error)]
    return []


def _disk_warnings(config: RLConfig, plan: RolePlan) -> list[str]:
    shortage = disk_shortage(config, plan.disk)
    if shortage is not None and config.disk.check:
        return [f"{shortage}\nA start would be refused; to start all the same: --disk.check false"]
    warning = shortage or disk_warning(config, plan.disk)
    return [warning] if warning is not None else []


_FOR_CHILDREN = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def carry_out(config: RLConfig, *, show: Callable[[], None], start: Callable[[], int]) -> int:
    """`start` the run, here or elsewhere; with --dry-run only `show` what that would do. The exit code."""
    if not config.dry_run:
        return start()
    with nothing_written():
        show()
    print("Nothing was written or started.", file=sys.stderr)
    return 0


def show_described(text: str, warnings: Iterable[str]) -> None:
    """Print what would be started, and what is in its way."""
    print(text)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


@contextmanager
def nothing_written() -> Iterator[None]:
    """Look around without a trace: Python writes no compiled modules beside those of the user, and nothing is
    fetched into the cache of the Hugging Face hub."""
    bytecode, variables = sys.dont_write_bytecode, dict(os.environ)
    offline = _set_offline(True)
    sys.dont_write_bytecode = True
    os.environ.update(_FOR_CHILDREN)
    try:
        yield
    finally:
        sys.dont_write_bytecode = bytecode
        for name in _FOR_CHILDREN:
            os.environ.pop(name)
        os.environ.update({name: variables[name] for name in _FOR_CHILDREN if name in variables})
        _set_offline(offline)


def _set_offline(value: bool) -> bool:
    """Tell the hub's library, which reads its variable only once; returns what it had read."""
    constants = sys.modules.get("huggingface_hub.constants")
    before = bool(getattr(constants, "HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE") == "1"))
    if constants is not None:
        constants.HF_HUB_OFFLINE = value  # type: ignore[attr-defined]
    return before
