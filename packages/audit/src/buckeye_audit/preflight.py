"""All checks of `rl doctor`: of the machine, of a configuration, and of what its environments teach the
model."""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import buckeye
from buckeye.base.disk import free_bytes, human_bytes
from buckeye.base.keys import key
from buckeye.base.process import usable_cores
from buckeye.config.environments import EvalsConfig, MeasuredEnvConfig, TrainEnvConfig
from buckeye.config.rl import RLConfig
from buckeye.config.shared import EvalSamplingConfig, PolicyModelConfig
from buckeye.envs.base import TRAIN
from buckeye.errors import BuckeyeError, UsageError
from buckeye.inference.vllm.interpreter import find_vllm, require_vllm
from buckeye.monitor.signals import verdict
from buckeye.monitor.tracker import check_trackers
from buckeye.orchestrator.evaluation import EvalResult
from buckeye.sizing.check import Check, failed, ok, skipped, warning
from buckeye.sizing.devices import Gpu, gpus, main_memory, slots_instead, this_machine
from buckeye.sizing.disk import DiskEstimate, disk_shortage, disk_table, disk_warning, estimate_disk
from buckeye.sizing.doctor import (
    check_libraries,
    check_settings,
    check_torch_build,
    extras_of,
    memory_of,
    shares_memory,
)
from buckeye.sizing.model import check_model, check_tokenizer, fetch_small_files, find_model
from buckeye.sizing.places import (
    check_directory,
    check_open_files,
    check_servers,
    check_shared_memory,
    check_store,
)
from buckeye.sizing.plan import RolePlan, make_plan
from buckeye.sizing.ports import AnyPorts, is_free
from buckeye.sizing.tasks import check_tasks, title_of
from buckeye_audit.check import CheckOptions, check_environment
from buckeye_audit.checks.result import shortened
from buckeye_audit.diagnosis.learning import EASIER_TASKS, HARDER_TASKS, MORE_TOKENS, reason_without_spread
from buckeye_audit.evals import evaluate_model
from buckeye_audit.group_spread import spread_of

Progress = Callable[[str], None]

PYTHON, VLLM, DISK, PORTS = "Python", "vLLM", "disk", "ports"
_LESS_DISK = "the table has the setting for each kind of files; or choose another --output-dir"
SPREAD = "group spread"
_SAMPLE = 20  # tasks of each family and split: `buckeye env check` looks at more
_LIMIT = 0.03
_LITTLE = 0.2
_MUCH_CUT = 0.2
_GROUP = 8


def examine(config: RLConfig | None, *, sample: int, progress: Progress) -> list[Check]:
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
    yield check_store(config)
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


def check_python() -> Check:
    """Show which Python this is."""
    return ok(PYTHON, f"{platform.python_version()}, {sys.executable}")


def check_vllm(config: RLConfig | None, *, gpus: int) -> Check:
    """Whether the engine that the configuration asks for is there. Starts an interpreter or two."""
    try:
        if config is not None and config.inference is not None and config.inference.backend == "vllm":
            found = require_vllm(config.inference.vllm_python)
        elif gpus or config is None:
            inference = config.inference if config is not None else None
            present = find_vllm(inference.vllm_python if inference is not None else None)
            if present is None:
                return skipped(VLLM, "not installed; the embedded engine serves (`buckeye vllm install`)")
            found = present
        else:
            return skipped(VLLM, "not asked for: the embedded engine serves on a CPU")
    except UsageError as error:
        return failed(VLLM, str(error), "")
    return ok(VLLM, f"{found.distribution} {found.version}, {found.python}")


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


def check_disk(config: RLConfig, estimate: DiskEstimate) -> Check:
    """What the run will leave, against what is free."""
    lines = disk_table(config, estimate).splitlines()
    if estimate.total is None:
        return skipped(DISK, "how much the run needs is not known before the model is here")
    seen = f"needs up to {human_bytes(estimate.total)}, {human_bytes(free_bytes(config.output_dir))} free"
    shortage = disk_shortage(config, estimate)
    if shortage is not None and config.disk.check:
        return failed(DISK, shortage.partition("\n")[0].rstrip(":"), _LESS_DISK, lines)
    if shortage is not None or disk_warning(config, estimate) is not None:
        return warning(DISK, seen, _LESS_DISK, lines)
    return ok(DISK, seen, lines)


def check_ports(ports: Sequence[int]) -> Check:
    """Whether the ports that were chosen are free; others are picked among those that are."""
    taken = [port for port in ports if not is_free(port)]
    if taken:
        return failed(
            PORTS,
            f"somebody listens on {', '.join(map(str, taken))}",
            "choose another --inference.server.port, or leave it out: free ones are found",
        )
    chosen = ", ".join(map(str, ports))
    return ok(PORTS, f"{chosen} free" if ports else "free ones are picked when the run starts")


def _chosen_ports(config: RLConfig) -> list[int]:
    inference = config.inference
    if inference is None or "port" not in inference.server.model_fields_set:
        return []
    return [inference.server.port + i for i in range(len(config.inference_gpu_ids) // inference.parallel.tp)]


def check_clock(output_dir: Path | None) -> Check:
    """The clock is not behind the files that were written with it."""
    name, now = "clock", time.time()
    newest = Path(buckeye.__file__).stat().st_mtime
    if output_dir is not None and output_dir.is_dir():
        newest = max([newest, *(entry.stat().st_mtime for entry in os.scandir(output_dir))])
    shown = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    if newest > now + 60:
        behind = (newest - now) / 60
        return warning(
            name,
            f"{shown}, which is {behind:.0f} minutes before the time of files that are there",
            "set it: times in logs and certificates depend on it",
        )
    return ok(name, shown)


def _keys(config: RLConfig) -> Check:
    settings = config.trainer.wandb
    try:
        check_trackers(config.trackers(settings))
    except UsageError as error:
        return failed("keys", str(error), "")
    there = ["HF_TOKEN"] if key("HF_TOKEN") else []
    used = (
        "Weights & Biases can be reached with a key or offline" if settings is not None else "none is needed"
    )
    return ok("keys", f"{used}{'; HF_TOKEN is set' if there else ''}")


def check_played(env: TrainEnvConfig, progress: Callable[[str], None]) -> Check:
    """Play an environment that has tasks, as `buckeye env check` does."""
    name, again = f"environment {env.id}", f"buckeye env check {env.id}"
    progress(f"checking {env.id}")
    options = CheckOptions(sample=_SAMPLE, limit=_LIMIT, variables=tuple(env.variables), progress=progress)
    try:
        report = asyncio.run(check_environment(env.id, env.args, options))
    except BuckeyeError as error:
        return failed(name, str(error), "")
    lines = [f"{check.status:>7}  {check.name}: {shortened(check.detail)}" for check in report.checks]
    if verdict(report.rollouts, report.errored) == "failed":
        return failed(name, f"{report.errored:,} of {report.rollouts:,} rollouts errored", again, lines)
    wrong = [check for check in report.checks if check.status == "error"]
    wrong += [check for check in report.checks if check.status == "warning"]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return warning(name, f"{wrong[0].name}: {shortened(wrong[0].detail)}{more}", again, lines)
    return ok(name, f"{len(lines)} checks on a sample of {_SAMPLE}", lines)


def check_spread(config: RLConfig, groups: int) -> list[Check]:
    """Play groups of every environment with the model itself, as training would. Takes as long as sampling
    does."""
    if find_model(config.trainer.model.name) is None:
        return [skipped(SPREAD, "the model is not on this machine")]
    try:
        results = asyncio.run(evaluate_model(_sample(config, groups)))
    except BuckeyeError as error:
        return [failed(SPREAD, str(error), "")]
    return [spread_check(result) for result in results]


def _sample(config: RLConfig, groups: int) -> EvalsConfig:
    orchestrator = config.orchestrator
    sampling = orchestrator.sampling
    return EvalsConfig(
        env=[
            MeasuredEnvConfig(
                **env.model_dump(exclude={"ratio", "rollouts_per_example"}),
                split=TRAIN,
                num_examples=groups,
                rollouts_per_example=size if size > 1 else _GROUP,
            )
            for env, size in zip(orchestrator.env, orchestrator.group_sizes, strict=True)
        ],
        model=PolicyModelConfig(name=config.trainer.model.name),
        sampling=EvalSamplingConfig(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
        ),
        seq_len=orchestrator.seq_len,
        max_concurrent=orchestrator.max_concurrent,
        rollout_timeout=orchestrator.rollout_timeout,
        seed=orchestrator.seed,
    )


def spread_check(result: EvalResult) -> Check:
    """What the rewards of the groups say: where all of a group are equal, it teaches nothing."""
    name = f"{SPREAD} in {result.env_name}"
    spread = spread_of(result)
    if not spread.scored:
        first = result.errors[0].outcome.error if result.errors else "there are no tasks"
        return failed(name, f"no group has two scored rollouts; {spread.errored} errored: {first}", "")
    rewards = [rollout.reward for rollout in result.rollouts if rollout.reward is not None]
    mean, zero = statistics.fmean(rewards), spread.scored - spread.spread
    seen = (
        f"{zero} of {spread.scored} groups of {spread.size} have no spread ({zero / spread.scored:.0%}), "
        f"mean reward {mean:.3f}, {spread.truncated:.0%} truncated"
    )
    if spread.errored:
        seen += f", {spread.errored} rollouts errored"
    if verdict(len(result.played), spread.errored) == "failed":
        return failed(name, seen, f"see why: buckeye env check {result.env_name}")
    if not spread.spread:
        return warning(name, seen, _why_no_spread(result, spread.size))
    if spread.truncated > _MUCH_CUT:
        return warning(name, seen, f"many replies are cut off: {MORE_TOKENS}")
    if spread.spread / spread.scored < _LITTLE:
        return warning(name, seen, _what_to_do(mean, max(rewards)))
    return ok(name, seen)


def _why_no_spread(result: EvalResult, size: int) -> str:
    tasks = [[r.reward for r in rollouts if r.reward is not None] for rollouts in result.by_task.values()]
    reason = reason_without_spread(
        mean=result.mean_reward,
        std=statistics.pstdev(result.rewards),
        solved=statistics.fmean(min(rewards) >= 1.0 for rewards in tasks),
        unsolved=statistics.fmean(max(rewards) <= 0.0 for rewards in tasks),
        truncated=statistics.fmean(rollout.truncated for rollout in result.rollouts),
        alike=0.0,  # what nobody has trained yet has not collapsed
        size=size,
    )
    return f"{reason.cause}: {reason.advice}"


def _what_to_do(mean: float, best: float) -> str:
    if mean > best / 2 and best > 0:
        return f"the model can do nearly all of it: {HARDER_TASKS}"
    return f"nearly all fail alike: {EASIER_TASKS}"
