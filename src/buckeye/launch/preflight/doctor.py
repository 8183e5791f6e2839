"""The list of all checks before a run. `rl`, `rl --dry-run` and `rl doctor` each run some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from buckeye.config.rl import RLConfig
from buckeye.launch.preflight.check import Check, failed, warning
from buckeye.launch.preflight.device_checks import (
    check_colocation,
    check_cores,
    check_gpus,
    check_memory_plan,
    check_processes,
    check_trainer,
)
from buckeye.launch.preflight.devices import Gpu, gpus
from buckeye.launch.preflight.disk import check_disk, estimate_disk
from buckeye.launch.preflight.model import find_model
from buckeye.launch.preflight.model_checks import (
    MODEL,
    TOKENIZER,
    check_model,
    check_tokenizer,
    fetch_small_files,
)
from buckeye.launch.preflight.resource_checks import (
    check_directory,
    check_keys,
    check_network,
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

Occasion = Literal["start", "dry run", "doctor", "offline"]
_EVERY_TIME: Sequence[Occasion] = ("start", "dry run", "doctor", "offline")
_BEFORE_RUNS: Sequence[Occasion] = ("start", "doctor", "offline")
_DOCTOR: Sequence[Occasion] = ("doctor", "offline")
_WITHOUT_NETWORK: Sequence[Occasion] = ("dry run", "doctor", "offline")
_WITH_NETWORK: Sequence[Occasion] = ("start", "doctor")


@dataclass(frozen=True, kw_only=True)
class PreflightContext:
    """Input of the checks: this machine and, unless `config` is None, a run.

    `sample` is the number of groups of rollouts that the checks run with the model. `progress` gets a text
    before a slow check. `fetch` is the command that downloads everything that the run needs, if the run will
    have no network; "" otherwise. `results` collects the results of finished checks.
    """

    config: RLConfig | None
    sample: int = 0
    progress: Callable[[str], None] = lambda _: None
    fetch: str = ""
    results: list[Check] = field(default_factory=list)

    @property
    def run(self) -> RLConfig:
        """Configuration of the run, for checks with `needs_config`."""
        assert self.config is not None
        return self.config

    @cached_property
    def gpus(self) -> list[Gpu]:
        """GPUs of this machine, or [] for a run on the CPU."""
        return [] if self.config is not None and self.config.trainer.model.device == "cpu" else gpus()

    @cached_property
    def model_path(self) -> Path | None:
        """Folder of the model, or None if it is not on this machine."""
        return find_model(self.run.trainer.model.name)

    @property
    def usable_model(self) -> Path | None:
        """Folder of the model, or None if it is not on this machine or its check has failed."""
        return None if self.has_failed(MODEL) else self.model_path

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
    """A check, and the occasions when it runs.

    A start of `rl` runs the fast checks. `rl --dry-run` and `rl doctor --offline` run the checks that need no
    network. `needs_config` is False for a check of the machine that needs no run. `after_model` is True for a
    check that is left out if the check of the model has failed.
    """

    run: Callable[[PreflightContext], Check | Iterable[Check]]
    occasions: Sequence[Occasion] = _DOCTOR
    needs_config: bool = True
    after_model: bool = False


def run_preflight_checks(
    context: PreflightContext, occasion: Occasion, checks: Sequence[PreflightCheck] | None = None
) -> list[Check]:
    """Run the checks of an occasion in order, and return all results so far."""
    for check in CHECKS if checks is None else checks:
        if occasion not in check.occasions or (check.needs_config and context.config is None):
            continue
        if not (check.after_model and context.has_failed(MODEL)):
            result = check.run(context)
            context.results.extend([result] if isinstance(result, Check) else result)
    return context.results


def _model(context: PreflightContext) -> Check:
    check = check_model(context.run, vllm=uses_vllm(context.run, on_gpu=bool(context.gpus)))
    if context.fetch and context.model_path is None and check.state == "skipped":
        name = context.run.trainer.model.name
        return failed(MODEL, f"{name} is not complete on this machine", context.fetch, code="BK-OFFLINE")
    return check


def _model_on_hub(context: PreflightContext) -> Iterable[Check]:
    name = context.run.trainer.model.name
    if context.model_path is None:
        context.progress(f"looking up {name} on the Hugging Face hub")
        yield fetch_small_files(name)


def _settings(context: PreflightContext) -> Iterable[Check]:
    """Yield failures for settings that the trainer rejects, and warnings for models that it must download."""
    problems = trainer_warnings(context.run, context.usable_model, on_gpu=bool(context.gpus))
    yield from (failed("settings", line, "") for line in problems)
    for line in reference_warnings(context.run.trainer.loss):
        is_missing = bool(context.fetch)
        yield (failed if is_missing else warning)("settings", line, context.fetch)


def _tasks(context: PreflightContext) -> Iterator[Check]:
    context.progress("loading the environments")
    for check in check_tasks(context.run, None if context.has_failed(TOKENIZER) else context.usable_model):
        yield replace(check, do=context.fetch) if context.fetch and check.code == "BK-OFFLINE" else check


def _tasks_quickly(context: PreflightContext) -> list[Check]:
    return check_tasks_quickly(context.run, None if context.has_failed(TOKENIZER) else context.usable_model)


CHECKS: Sequence[PreflightCheck] = (
    PreflightCheck(lambda context: check_python(), needs_config=False),
    PreflightCheck(
        lambda context: check_libraries(extras_of(context.config)), _BEFORE_RUNS, needs_config=False
    ),
    PreflightCheck(lambda context: check_torch_build(len(context.gpus)), _BEFORE_RUNS, needs_config=False),
    PreflightCheck(lambda context: check_vllm(context.config, gpus=len(context.gpus)), needs_config=False),
    PreflightCheck(lambda context: check_gpus(context.config, context.gpus), _EVERY_TIME, needs_config=False),
    PreflightCheck(lambda context: check_cores(), needs_config=False),
    PreflightCheck(
        lambda context: check_shared_memory(needed=context.shares_memory), _BEFORE_RUNS, needs_config=False
    ),
    PreflightCheck(
        lambda context: check_directory(context.config.output_dir if context.config else Path.cwd()),
        _BEFORE_RUNS,
        needs_config=False,
    ),
    PreflightCheck(_model, _EVERY_TIME),
    PreflightCheck(_model_on_hub, ("doctor",), after_model=True),
    PreflightCheck(lambda context: check_tokenizer(context.run), _EVERY_TIME, after_model=True),
    PreflightCheck(_settings, _EVERY_TIME),
    PreflightCheck(lambda context: check_processes(context.run, context.usable_model), _WITHOUT_NETWORK),
    PreflightCheck(lambda context: check_colocation(context.run, context.gpus), _WITHOUT_NETWORK),
    PreflightCheck(
        lambda context: check_memory_plan(context.run, context.gpus), _BEFORE_RUNS, after_model=True
    ),
    PreflightCheck(
        lambda context: check_trainer(context.run, context.gpus), _WITHOUT_NETWORK, after_model=True
    ),
    PreflightCheck(
        lambda context: check_disk(context.run, estimate_disk(context.run, context.model_path)),
        _WITHOUT_NETWORK,
        after_model=True,
    ),
    PreflightCheck(lambda context: check_ports(context.run)),
    PreflightCheck(lambda context: check_servers(context.run), _WITH_NETWORK),
    PreflightCheck(lambda context: check_store(context.run), _WITH_NETWORK),
    PreflightCheck(lambda context: check_network(context.run), ("offline",)),
    PreflightCheck(lambda context: check_keys(context.run), _WITHOUT_NETWORK),
    PreflightCheck(_tasks_quickly, ("start",)),
    PreflightCheck(_tasks, _WITHOUT_NETWORK),
)
"""All checks before a run, except the checks of `rl doctor` that run rollouts."""
