"""The list of checks before a run; `rl`, `rl --dry-run` and `rl doctor` each make a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from buckeye.config.rl import RLConfig
from buckeye.launch.preflight.check import Check, failed, warning
from buckeye.launch.preflight.device_checks import check_cores, check_gpus, check_memory_plan, check_processes
from buckeye.launch.preflight.devices import Gpu, gpus
from buckeye.launch.preflight.disk import check_disk, estimate_disk
from buckeye.launch.preflight.model import (
    TOKENIZER,
    check_model,
    check_tokenizer,
    fetch_small_files,
    find_model,
)
from buckeye.launch.preflight.resource_checks import (
    check_directory,
    check_keys,
    check_ports,
    check_servers,
    check_shared_memory,
    check_store,
)
from buckeye.launch.preflight.software_checks import (
    check_libraries,
    check_python,
    check_torch_build,
    check_vllm,
    extras_of,
    uses_vllm,
)
from buckeye.launch.preflight.task_checks import check_tasks, check_tasks_quickly
from buckeye.launch.preflight.trainer_checks import reference_warnings, trainer_warnings

Occasion = Literal["start", "dry run", "doctor"]


@dataclass(frozen=True, kw_only=True)
class PreflightContext:
    """The machine and, with `config`, a run to check.

    `sample` is the number of groups to run with the model, 0 for none. `results` collects the results.
    """

    config: RLConfig | None
    sample: int = 0
    progress: Callable[[str], None] = lambda _: None
    results: list[Check] = field(default_factory=list)

    @property
    def run(self) -> RLConfig:
        """Configuration, for checks that need one."""
        assert self.config is not None
        return self.config

    @cached_property
    def gpus(self) -> list[Gpu]:
        """Usable GPUs; empty for a run on the CPU."""
        return [] if self.config is not None and self.config.trainer.model.device == "cpu" else gpus()

    @cached_property
    def model_path(self) -> Path | None:
        """Folder of the model, or None if it is not on this machine."""
        return find_model(self.run.trainer.model.name)

    @property
    def shares_memory(self) -> bool:
        """True if processes of the run exchange data through shared memory."""
        config = self.config
        several = config is None or len(config.trainer_gpu_ids) > 1 or config.inference is not None
        return bool(self.gpus) and several

    def has_failed(self, name: str) -> bool:
        """Return True if a check with this name has failed."""
        return any(check.name == name and check.state == "failed" for check in self.results)


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """A check, and the occasions for it.

    `start` makes the fast checks, `dry run` those that need no network. `needs_config` is False for a check
    of the machine alone.
    """

    look: Callable[[PreflightContext], Check | Iterable[Check]]
    occasions: Sequence[Occasion] = ("doctor",)
    needs_config: bool = True


def run_preflight_checks(
    examination: PreflightContext, occasion: Occasion, checks: Sequence[PreflightCheck] | None = None
) -> list[Check]:
    """Run the checks of an occasion in order, and return all results so far."""
    for check in CHECKS if checks is None else checks:
        if occasion in check.occasions and (examination.config is not None or not check.needs_config):
            result = check.look(examination)
            examination.results.extend([result] if isinstance(result, Check) else result)
    return examination.results


def _model(this: PreflightContext) -> Check:
    return check_model(this.run, vllm=uses_vllm(this.run, on_gpu=bool(this.gpus)))


def _model_on_hub(this: PreflightContext) -> Iterable[Check]:
    name = this.run.trainer.model.name
    if this.model_path is None and not this.has_failed("model"):
        this.progress(f"asking the Hugging Face hub for {name}")
        yield fetch_small_files(name)


def _settings(this: PreflightContext) -> Iterable[Check]:
    """Yield failures for settings that the trainer rejects, and warnings for models that it must download."""
    refused = trainer_warnings(this.run, this.model_path, on_gpu=bool(this.gpus))
    yield from (failed("settings", line, "") for line in refused)
    yield from (warning("settings", line, "") for line in reference_warnings(this.run.trainer.loss))


def _tasks(this: PreflightContext) -> Iterable[Check]:
    this.progress("loading the environments")
    has_tokenizer = this.model_path is not None and not this.has_failed(TOKENIZER)
    return check_tasks(this.run, this.model_path if has_tokenizer else None)


def _tasks_at_once(this: PreflightContext) -> list[Check]:
    return check_tasks_quickly(this.run, None if this.has_failed(TOKENIZER) else this.model_path)


CHECKS: Sequence[PreflightCheck] = (
    PreflightCheck(lambda this: check_python(), needs_config=False),
    PreflightCheck(
        lambda this: check_libraries(extras_of(this.config)), ("start", "doctor"), needs_config=False
    ),
    PreflightCheck(lambda this: check_torch_build(len(this.gpus)), ("start", "doctor"), needs_config=False),
    PreflightCheck(lambda this: check_vllm(this.config, gpus=len(this.gpus)), needs_config=False),
    PreflightCheck(
        lambda this: check_gpus(this.config, this.gpus), ("start", "dry run", "doctor"), needs_config=False
    ),
    PreflightCheck(lambda this: check_cores(), needs_config=False),
    PreflightCheck(
        lambda this: check_shared_memory(needed=this.shares_memory), ("start", "doctor"), needs_config=False
    ),
    PreflightCheck(
        lambda this: check_directory(this.config.output_dir if this.config else Path.cwd()),
        ("start", "doctor"),
        needs_config=False,
    ),
    PreflightCheck(_model, ("start", "dry run", "doctor")),
    PreflightCheck(_model_on_hub),
    PreflightCheck(lambda this: check_tokenizer(this.run), ("start", "dry run", "doctor")),
    PreflightCheck(_settings, ("start", "dry run", "doctor")),
    PreflightCheck(lambda this: check_processes(this.run, this.model_path), ("dry run", "doctor")),
    PreflightCheck(lambda this: check_memory_plan(this.run, this.gpus), ("start", "doctor")),
    PreflightCheck(
        lambda this: check_disk(this.run, estimate_disk(this.run, this.model_path)), ("dry run", "doctor")
    ),
    PreflightCheck(lambda this: check_ports(this.run)),
    PreflightCheck(lambda this: check_servers(this.run), ("start", "doctor")),
    PreflightCheck(lambda this: check_store(this.run), ("start", "doctor")),
    PreflightCheck(lambda this: check_keys(this.run), ("dry run", "doctor")),
    PreflightCheck(_tasks_at_once, ("start",)),
    PreflightCheck(_tasks, ("dry run", "doctor")),
)
"""All checks before a run, except those that run rollouts, which `rl doctor` adds."""
