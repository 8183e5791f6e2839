"""All checks of a machine and of a configuration, as `rl doctor` makes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from buckeye.config.rl import RLConfig
from buckeye.errors import BuckeyeError, UsageError
from buckeye.inference.vllm.interpreter import find_vllm
from buckeye.monitor.tracker import check_wandb
from buckeye.process import usable_cores
from buckeye.run.disk import estimate_disk
from buckeye.run.machine import this_machine
from buckeye.run.model_files import find_model
from buckeye.run.plan import RolePlan, make_plan
from buckeye.run.ports import AnyPorts
from buckeye.run.preflight.check import Check, failed, ok, skipped, warning
from buckeye.run.preflight.devices import Gpu, gpus, main_memory, slots_instead
from buckeye.run.preflight.environment import check_played, check_spread
from buckeye.run.preflight.model import check_model, check_tokenizer, fetch_small_files
from buckeye.run.preflight.places import (
    check_clock,
    check_directory,
    check_disk,
    check_open_files,
    check_ports,
    check_servers,
    check_shared_memory,
)
from buckeye.run.preflight.software import (
    check_libraries,
    check_python,
    check_torch_build,
    check_vllm,
    extras_of,
)
from buckeye.run.preflight.start import check_settings, memory_of, shares_memory
from buckeye.run.preflight.tasks import check_tasks, title_of
from buckeye.run.rl import wandb_settings
from buckeye.space import human_bytes
from buckeye.tasks.keys import key

Progress = Callable[[str], None]


def examine(config: RLConfig | None, *, sample: int = 0, progress: Progress = lambda _: None) -> list[Check]:
    """All checks, of the machine and, if there is one, of a configuration. With `sample` so many groups of
    every environment are played with the model."""
    progress("looking at the machine")
    present = gpus()
    checks = [
        check_python(),
        check_libraries(extras_of(config)),
        check_torch_build(len(present)),
        check_vllm(config, gpus=len(present)),
        _gpus(config, present),
        _cores(),
        check_open_files(config),
        check_shared_memory(needed=shares_memory(config, present)),
        check_clock(config.output_dir if config is not None else None),
    ]
    if config is None:
        return [*checks, check_directory(Path.cwd())]
    return [*checks, *_of_run(config, present, sample=sample, progress=progress)]


def _of_run(config: RLConfig, present: list[Gpu], *, sample: int, progress: Progress) -> Iterator[Check]:
    vllm = _serves_with_vllm(config, present)
    model_path = find_model(config.trainer.model.name)
    model = check_model(config, vllm=vllm)
    if model.state == "skipped":
        progress(f"asking the Hugging Face hub for {config.trainer.model.name}")
        model = fetch_small_files(config.trainer.model.name)
    yield model
    tokenizer = check_tokenizer(config)
    yield tokenizer
    yield from check_settings(config, on_gpu=bool(present) and config.trainer.model.device != "cpu")
    yield _threads(config, model_path)
    yield memory_of(config, present, vllm=vllm)
    yield check_directory(config.output_dir)
    yield check_disk(config, estimate_disk(config, model_path))
    yield check_ports(_chosen_ports(config))
    yield check_servers(config)
    yield _keys(config)
    progress("loading the environments")
    tasks = list(check_tasks(config, model_path if tokenizer.state == "ok" else None))
    yield from tasks
    unplayable = {check.name for check in tasks if check.state == "failed"}
    environments = [
        check_played(env, progress)
        for env in config.orchestrator.env
        if not unplayable & {"environments", title_of(env)}
    ]
    yield from environments
    if not sample:
        yield skipped("group spread", "`--sample 8` plays 8 groups with the model, and tells what they teach")
    elif any(check.state == "failed" for check in (model, *tasks, *environments)):
        yield skipped("group spread", "the model and the environments must be in order first")
    else:
        progress(f"playing {sample} groups with {config.trainer.model.name}")
        yield from check_spread(config, sample)


def _serves_with_vllm(config: RLConfig, present: list[Gpu]) -> bool:
    if config.inference is None or config.inference.backend == "torch":
        return False
    if config.inference.backend == "vllm":
        return True
    try:
        on_gpu = bool(present) and config.inference.model.device != "cpu"
        return on_gpu and find_vllm(config.inference.vllm_python) is not None
    except UsageError:
        return False


def _gpus(config: RLConfig | None, present: list[Gpu]) -> Check:
    name = "GPUs"
    lines = [
        f"GPU {gpu.index}: {gpu.name}, {human_bytes(gpu.free)} of {human_bytes(gpu.total)} free"
        + "".join(f"; {who} ({pid}) holds {human_bytes(size)}" for pid, who, size in gpu.users)
        for gpu in present
    ]
    slots = slots_instead(config, present) if config is not None else None
    if slots is not None:
        return warning(name, slots, "")
    if not present:
        return ok(name, "none here: everything is computed on the CPU")
    if config is None or config.trainer.model.device == "cpu":
        return ok(name, f"{len(present)}: {present[0].name}", lines)
    wanted = {*config.trainer_gpu_ids, *(config.inference_gpu_ids if config.inference is not None else [])}
    visible = this_machine().gpus
    absent = sorted(wanted - set(visible))
    if absent:
        return failed(
            name,
            f"{_listed(absent)} asked for, and there are {_listed(visible)}",
            "choose among those with --trainer-gpu-ids and --inference-gpu-ids (one may serve both)",
            lines,
        )
    busy = [gpu.index for gpu in present if gpu.index in wanted and gpu.users]
    if busy:
        return warning(name, f"other processes are on {_listed(busy)}", "end them, or choose others", lines)
    return ok(name, f"{_listed(sorted(wanted))} of {len(present)}: {present[0].name}", lines)


def _listed(ids: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))


def _cores() -> Check:
    memory = main_memory()
    cores, installed = usable_cores(), os.cpu_count() or 1
    share = f"{cores} cores" if cores == installed else f"{cores} of {installed} cores"
    return ok(
        "processor and memory",
        f"{share}, {human_bytes(memory.free)} of {human_bytes(memory.total)} memory free",
    )


def _threads(config: RLConfig, model_path: Path | None) -> Check:
    """How the cores are shared out."""
    name = "processes"
    try:
        plan = make_plan(config, this_machine(), model_path=model_path, ports=AnyPorts())
    except BuckeyeError as error:
        return failed(name, str(error), "")
    threads = max(int(role.env.get("BUCKEYE_THREADS", "1")) for role in plan.roles)
    seen = f"{_counted(plan)}, {threads} compute threads each, on {usable_cores()} cores"
    if not plan.on_gpu and len(plan.roles) - 1 > usable_cores():
        return warning(name, seen, "they share cores: fewer --inference-gpu-ids or --trainer-gpu-ids")
    return ok(name, seen)


def _counted(plan: RolePlan) -> str:
    return f"{len(plan.of_kind('inference'))} inference, {len(plan.of_kind('trainer'))} trainer"


def _chosen_ports(config: RLConfig) -> list[int]:
    inference = config.inference
    if inference is None or "port" not in inference.server.model_fields_set:
        return []
    return [inference.server.port + i for i in range(len(config.inference_gpu_ids) // inference.parallel.tp)]


def _keys(config: RLConfig) -> Check:
    settings = wandb_settings(config)
    try:
        check_wandb(settings)
    except UsageError as error:
        return failed("keys", str(error), "")
    there = ["HF_TOKEN"] if key("HF_TOKEN") else []
    used = (
        "Weights & Biases can be reached with a key or offline" if settings is not None else "none is needed"
    )
    return ok("keys", f"{used}{'; HF_TOKEN is set' if there else ''}")
