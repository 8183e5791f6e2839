"""All checks of a machine and of a configuration, as `rl doctor` makes them."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from buckeye.base.disk import human_bytes
from buckeye.base.distribution import absent, ask, cpu_torch_command, install_command, is_there, requirements
from buckeye.base.keys import key
from buckeye.base.process import usable_cores
from buckeye.config.rl import RLConfig
from buckeye.errors import BuckeyeError, UsageError
from buckeye.inference.vllm.interpreter import default_environment, find_vllm, require_vllm
from buckeye.monitor.tracker import check_wandb
from buckeye.sizing.check import Check, failed, ok, skipped, warning
from buckeye.sizing.devices import Gpu, gpus, main_memory, slots_instead, this_machine
from buckeye.sizing.disk import estimate_disk
from buckeye.sizing.fitting import MEMORY, check_memory
from buckeye.sizing.memory import Hardware, processor_has_bfloat16
from buckeye.sizing.model import check_model, check_tokenizer, fetch_small_files, find_model, read_shape
from buckeye.sizing.places import (
    check_clock,
    check_directory,
    check_disk,
    check_open_files,
    check_ports,
    check_servers,
    check_shared_memory,
    check_store,
)
from buckeye.sizing.plan import RolePlan, make_plan
from buckeye.sizing.ports import AnyPorts
from buckeye.sizing.tasks import check_tasks, check_tasks_at_once, title_of
from buckeye.sizing.trainer_checks import reference_warnings, trainer_warnings

# Whether Python and the libraries are ones that this version of Buckeye was made for.

PYTHON, LIBRARIES, VLLM = "Python", "libraries", "vLLM"


def check_python() -> Check:
    """Show which Python this is."""
    return ok(PYTHON, f"{platform.python_version()}, {sys.executable}")


def extras_of(config: RLConfig | None) -> list[str]:
    """The extras whose libraries a run with this configuration imports."""
    extras = ["train"]
    if config is not None and config.trainer.optim.type == "adamw8bit":
        extras.append("optim8bit")
    if config is not None and config.trainer.wandb:
        extras.append("wandb")
    return extras


def check_libraries(
    extras: Iterable[str],
    *,
    version_of: Callable[[str], str] = metadata.version,
) -> Check:
    """Compare what is installed with what the distribution asks for, which leaves out versions known to be
    bad."""
    wrong, found = [], []
    for requirement in map(Requirement, requirements(extras)):
        try:
            version = version_of(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed")
            continue
        found.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(Version(version), prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        return failed(LIBRARIES, "; ".join(wrong), install_command(*extras), sorted(found))
    main = [entry for entry in found if entry.split()[0] in ("torch", "transformers", "peft")]
    return ok(LIBRARIES, f"{', '.join(main)} and {len(found) - len(main)} more", sorted(found))


def check_torch_build(
    gpus: int,
    *,
    version_of: Callable[[str], str] = metadata.version,
    requirements_of: Callable[[str], list[str] | None] = metadata.requires,
) -> Check:
    """A GPU is of no use to a torch that was built without CUDA, and a torch for CUDA is large."""
    name = "torch's build"
    try:
        version = version_of("torch")
    except metadata.PackageNotFoundError:
        first = "" if gpus else f"without the gigabytes that a GPU needs: first {cpu_torch_command()}"
        return skipped(name, "torch is not installed", first)
    if not gpus and any(line.startswith("nvidia-") for line in requirements_of("torch") or ()):
        smaller = cpu_torch_command("--force-reinstall", "--no-deps")
        return ok(name, f"{version} for CUDA, no GPU; gigabytes less in a new environment, or: {smaller}")
    if gpus and version.endswith("+cpu"):
        return failed(
            name,
            f"torch {version} cannot use the {gpus} GPUs of this machine",
            "install torch built for CUDA (pytorch.org has the command), or set the devices to cpu",
        )
    return ok(name, f"{version}, {gpus} GPUs" if gpus else f"{version}, no GPU")


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


# The checks that `rl` makes by itself: those that take no time, and that nothing else at its start makes.


def before_start(config: RLConfig) -> list[Check]:
    """Look at libraries, model, memory, open files, directory and shared memory; at servers that are not
    started here, at what the trainer would refuse, at chosen GPUs where there are none, and at the tasks as
    far as they load at once."""
    present = gpus() if config.trainer.model.device != "cpu" else []
    vllm = _takes_vllm(config, on_gpu=bool(present))
    return [
        check_libraries(extras_of(config)),
        check_torch_build(len(present)),
        check_model(config, vllm=vllm),
        memory_of(config, present, vllm=vllm),
        check_open_files(config),
        check_directory(config.output_dir),
        check_servers(config),
        check_store(config),
        check_shared_memory(needed=shares_memory(config, present)),
        *check_settings(config, on_gpu=bool(present)),
        *check_slots(config, present),
        *check_tasks_at_once(config),
    ]


def check_settings(config: RLConfig, *, on_gpu: bool) -> list[Check]:
    """What the trainer would refuse, and what it would have to fetch."""
    model_path = find_model(config.trainer.model.name)
    name, refused = "settings", trainer_warnings(config, model_path, on_gpu=on_gpu)
    fetched = reference_warnings(config.trainer.loss)
    return [*(failed(name, one, "") for one in refused), *(warning(name, one, "") for one in fetched)]


def check_slots(config: RLConfig, present: Sequence[Gpu]) -> list[Check]:
    """A line if GPUs were chosen and there are none."""
    text = slots_instead(config, present)
    return [] if text is None else [warning("GPUs", text, "")]


def _takes_vllm(config: RLConfig, *, on_gpu: bool) -> bool:
    """Whether vLLM will serve, as far as can be told without starting an interpreter."""
    if config.inference is None or config.inference.backend == "torch":
        return False
    installed = importlib.util.find_spec("vllm") is not None or default_environment().is_dir()
    return config.inference.backend == "vllm" or (on_gpu and installed)


def memory_of(config: RLConfig, present: Sequence[Gpu], *, vllm: bool) -> Check:
    """The memory plan, for these GPUs and this machine's main memory."""
    path = find_model(config.trainer.model.name)
    shape = read_shape(path) if path is not None else None
    if shape is None:
        return skipped(MEMORY, "the sizes of the model are not known before it is here")
    return check_memory(config, shape, hardware_of(config, present, vllm=vllm))


def hardware_of(config: RLConfig, present: Sequence[Gpu], *, vllm: bool | None = None) -> Hardware:
    """What a run of this configuration has here; without `vllm`, whether that serves is found out."""
    on_gpu = config.trainer.model.device != "cpu"
    return Hardware(
        memory=main_memory(),
        gpus=tuple(present) if on_gpu else (),
        fast_bfloat16=processor_has_bfloat16(),
        vllm=_takes_vllm(config, on_gpu=on_gpu and bool(present)) if vllm is None else vllm,
    )


def shares_memory(config: RLConfig | None, present: Sequence[Gpu]) -> bool:
    """Whether processes of the run exchange data through shared memory."""
    several = config is None or len(config.trainer_gpu_ids) > 1 or config.inference is not None
    return bool(present) and several


# All checks of a machine and of a configuration, as `rl doctor` makes them.

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
    yield check_store(config)
    yield _keys(config)
    progress("loading the environments")
    tasks = list(check_tasks(config, model_path if tokenizer.state == "ok" else None))
    yield from tasks
    unplayable = {check.name for check in tasks if check.state == "failed"}
    if not is_there("buckeye_audit"):
        yield skipped("environment checks", str(absent("buckeye_audit", "playing them")))
        return
    check_played = ask("buckeye_audit.preflight:check_played", "`rl doctor`")
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
        yield from ask("buckeye_audit.preflight:check_spread", "`rl doctor --sample`")(config, sample)


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
    settings = config.trainer.wandb
    try:
        check_wandb(settings)
    except UsageError as error:
        return failed("keys", str(error), "")
    there = ["HF_TOKEN"] if key("HF_TOKEN") else []
    used = (
        "Weights & Biases can be reached with a key or offline" if settings is not None else "none is needed"
    )
    return ok("keys", f"{used}{'; HF_TOKEN is set' if there else ''}")
