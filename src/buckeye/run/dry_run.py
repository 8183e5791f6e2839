"""`rl --dry-run`: the resolved configuration and the plan, and warnings about what a real start would need.

Writes nothing, needs no network and no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from buckeye.config.dump import to_json
from buckeye.config.rl import RLConfig
from buckeye.envs.registry import load_environment
from buckeye.errors import BuckeyeError, UsageError
from buckeye.monitor.tracker import check_wandb
from buckeye.orchestrator.curriculum import load_curricula
from buckeye.orchestrator.environments import load_environments
from buckeye.run.directory import refuse_used
from buckeye.run.disk import disk_shortage, disk_table, disk_warning
from buckeye.run.machine import Machine, this_machine
from buckeye.run.model_files import find_model
from buckeye.run.plan import RolePlan, make_plan
from buckeye.run.ports import Ports, held_ports
from buckeye.run.resume import beginning, resume_command
from buckeye.run.rl import wandb_settings
from buckeye.run.trainer_checks import trainer_warnings


def describe(config: RLConfig, command: Sequence[str]) -> tuple[str, list[str]]:
    """The text to print and the warnings of a dry run."""
    model_path = find_model(config.trainer.model.name)
    with held_ports() as ports:
        plan, warnings = _plan(config, model_path, ports)
    warnings += _model_warnings(config, model_path)
    warnings += trainer_warnings(config, model_path, on_gpu=plan.on_gpu)
    warnings += _environment_warnings(config)
    warnings += _directory_warnings(config, command)
    warnings += _disk_warnings(config, plan)
    warnings += _wandb_warnings(config)
    tables = f"{plan_table(plan, config.output_dir)}\n\n{disk_table(config, plan.disk)}"
    return f"{to_json(config)}\n\n{tables}", warnings


def _plan(config: RLConfig, model_path: Path | None, ports: Ports) -> tuple[RolePlan, list[str]]:
    machine = this_machine()
    try:
        return make_plan(config, machine, model_path=model_path, ports=ports), []
    except UsageError as error:  # devices that are not here: plan as if they were, and say so
        inference_ids = config.inference_gpu_ids if config.inference is not None else []
        asked = tuple(sorted({*inference_ids, *config.trainer_gpu_ids}))
        pretended: Machine = replace(machine, gpus=asked)
        return make_plan(config, pretended, model_path=model_path, ports=ports), [str(error)]


def _wandb_warnings(config: RLConfig) -> list[str]:
    try:
        check_wandb(wandb_settings(config))
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
                str(role.port) if role.port is not None else "-",
                str(output_dir / "logs" / f"{role.log_name}.stdout"),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _model_warnings(config: RLConfig, model_path: Path | None) -> list[str]:
    if model_path is not None:
        return []
    name = config.trainer.model.name
    return [
        f"the weights of {name} are not on this machine; a start would fetch them from the Hugging Face hub"
    ]


def _environment_warnings(config: RLConfig) -> list[str]:
    warnings = []
    evaluated = config.orchestrator.eval.env if config.orchestrator.eval is not None else []
    for env in [*config.orchestrator.env, *evaluated]:
        try:
            load_environment(env.id, **env.args)
        except BuckeyeError as error:
            warnings.append(str(error))
    if config.orchestrator.curriculum and not warnings:
        try:
            load_curricula(load_environments(config.orchestrator.env), config.orchestrator.seed, {})
        except BuckeyeError as error:
            warnings.append(str(error))
    return warnings


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
