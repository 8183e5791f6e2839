"""The checks that `rl` makes by itself: those that take no time, and that nothing else at its start makes."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from buckeye.config.rl import RLConfig
from buckeye.inference.vllm.interpreter import default_environment
from buckeye.run.model_files import find_model
from buckeye.run.preflight.check import Check, failed, skipped, warning
from buckeye.run.preflight.devices import Gpu, gpus, main_memory, slots_instead
from buckeye.run.preflight.fitting import MEMORY, check_memory
from buckeye.run.preflight.memory import Hardware, processor_has_bfloat16
from buckeye.run.preflight.model import check_model
from buckeye.run.preflight.places import check_directory, check_open_files, check_servers, check_shared_memory
from buckeye.run.preflight.shape import read_shape
from buckeye.run.preflight.software import check_libraries, check_torch_build, extras_of
from buckeye.run.preflight.tasks import check_tasks_at_once
from buckeye.run.trainer_checks import reference_warnings, trainer_warnings


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
    hardware = Hardware(
        memory=main_memory(),
        gpus=tuple(present) if config.trainer.model.device != "cpu" else (),
        fast_bfloat16=processor_has_bfloat16(),
        vllm=vllm,
    )
    return check_memory(config, shape, hardware)


def shares_memory(config: RLConfig | None, present: Sequence[Gpu]) -> bool:
    """Whether processes of the run exchange data through shared memory."""
    several = config is None or len(config.trainer_gpu_ids) > 1 or config.inference is not None
    return bool(present) and several
