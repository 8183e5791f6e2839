"""What `rl` looks at before it starts anything: libraries, memory, settings. `rl doctor` looks at it, too."""

from __future__ import annotations

import difflib
import fnmatch
import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from buckeye.base.distribution import cpu_torch_command, install_command, requirements
from buckeye.base.own_function import missing_function
from buckeye.config.losses import LossConfig
from buckeye.config.rl import RLConfig
from buckeye.config.shared import OwnFunctionConfig
from buckeye.errors import InferenceError
from buckeye.inference.engine.architecture import read_config, tensor_shapes
from buckeye.inference.vllm.interpreter import default_environment
from buckeye.monitor.tracker import tracker_of
from buckeye.sizing.check import Check, failed, ok, skipped, warning
from buckeye.sizing.devices import Gpu, gpus, main_memory, slots_instead
from buckeye.sizing.disk import is_one_of
from buckeye.sizing.fitting import MEMORY, check_memory
from buckeye.sizing.memory import Hardware, processor_has_bfloat16
from buckeye.sizing.model import check_model, find_model, read_shape
from buckeye.sizing.places import (
    check_directory,
    check_open_files,
    check_servers,
    check_shared_memory,
    check_store,
)
from buckeye.sizing.tasks import check_tasks_at_once
from buckeye.trainer.model.trainable import untrainable

# Whether Python and the libraries are ones that this version of Buckeye was made for.

LIBRARIES = "libraries"


def extras_of(config: RLConfig | None) -> list[str]:
    """The extras whose libraries a run with this configuration imports."""
    extras = ["train"]
    if config is not None and config.trainer.optim.type == "adamw8bit":
        extras.append("optim8bit")
    if config is not None:
        extras += [tracker_of(one).folder for one in config.trackers(config.trainer.wandb)]
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


# What a trainer would refuse once its model is loaded, said before it is started.

_OUTER = ("embed_tokens", "lm_head")  # which are no hidden layers


def trainer_warnings(config: RLConfig, model_path: Path | None, *, on_gpu: bool) -> list[str]:
    """One line for each setting that the trainer of a run will refuse, a model that it cannot train, or a
    function of the user's that is not there; names of the model's parameters are those in its files, so
    nothing is said of a model that is not here."""
    found = [*_own_functions(config), *_sharding_warnings(config, on_gpu=on_gpu)]
    if model_path is not None:
        with suppress(InferenceError):  # no configuration at all: the check of the model says so
            refused = untrainable(read_config(model_path / "config.json"))
            found += [f"model.name: {model_path}/config.json: {reason}" for reason in refused]
    shapes = tensor_shapes(model_path) if model_path is not None else {}
    if shapes:
        lora = config.trainer.model.experimental.lora
        if lora is None:
            patterns = [name for group in config.trainer.optim.groups for name in group.names]
            found += _pattern_warnings(patterns, shapes)
        else:
            matrices = [name.rpartition(".")[0] for name, shape in shapes.items() if len(shape) == 2]
            found += _target_warnings(lora.target_modules, matrices)
    return found


def reference_warnings(loss: LossConfig) -> list[str]:
    """Whether the trainer will have to fetch the model that the loss compares with."""
    if loss.reference_model is None or find_model(loss.reference_model) is not None:
        return []
    return [f"trainer.loss.reference_model: the weights of {loss.reference_model} are not on this machine"]


def _own_functions(config: RLConfig) -> Iterator[str]:
    shaping = config.orchestrator.reward_shaping
    sections = {
        "trainer.loss": config.trainer.loss,
        "orchestrator.advantage": config.orchestrator.advantage,
        "orchestrator.reward_shaping.function": shaping.function if shaping is not None else None,
    }
    for name, section in sections.items():
        missing = missing_function(section.import_path) if isinstance(section, OwnFunctionConfig) else None
        if missing is not None:
            yield f"{name}.import_path: {missing}"


def _sharding_warnings(config: RLConfig, *, on_gpu: bool) -> Iterator[str]:
    """Forced sharding is an error of the configuration; whether `auto` divides is known with the devices."""
    model = config.trainer.model
    divides = on_gpu and model.device != "cpu" and (config.trainer_ranks > 1 or model.fsdp_cpu_offload)
    if config.trainer.optim.type == "adamw8bit" and model.sharding == "auto" and divides:
        yield (
            "trainer.optim.type: adamw8bit cannot update a model that is divided among GPUs; set "
            'trainer.model.sharding = "none", or use adamw'
        )


def _pattern_warnings(patterns: Collection[str], names: Collection[str]) -> Iterator[str]:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            yield (
                f"trainer.optim.groups: no parameter of the model has a name like {pattern!r}; "
                f"it has {', '.join(close)} ..."
            )


def _target_warnings(targets: Collection[str], matrices: Collection[str]) -> Iterator[str]:
    hidden = [name for name in matrices if name.rpartition(".")[2] not in _OUTER]
    missing = [target for target in targets if not any(is_one_of(name, [target]) for name in hidden)]
    if missing or not targets:
        kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in hidden))
        yield (
            f"trainer.model.experimental.lora.target_modules: {', '.join(missing) or 'an empty list'} is no "
            f"hidden linear layer of the model; it has {kinds}"
        )


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
