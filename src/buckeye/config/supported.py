"""Settings that are accepted by name and not built in this version: what is refused, what is only said.

An error where ignoring the setting would change results or break a promise; a warning where it is about speed
or memory only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from buckeye.config.inference import InferenceConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.problems import Level, Problem
from buckeye.config.propagate import shared_settings
from buckeye.config.rl import RLConfig
from buckeye.config.settings import KeyPath
from buckeye.config.sft import SFTConfig
from buckeye.config.shared import BaseConfig
from buckeye.config.trainer import TrainerConfig


@dataclass(frozen=True, slots=True)
class Rule:
    """`built` are the values of the setting that ask for nothing that is not built."""

    path: str
    built: tuple[Any, ...]
    message: str
    level: Level = "error"

    def matters(self, value: Any) -> bool:
        """Whether a value asks for what is not built."""
        return value not in self.built


def _refused(*rows: tuple[str, tuple[Any, ...], str]) -> tuple[Rule, ...]:
    return tuple(Rule(*row) for row in rows)


def _told(*rows: tuple[str, tuple[Any, ...], str]) -> tuple[Rule, ...]:
    return tuple(Rule(*row, level="warning") for row in rows)


_EMPTY: tuple[Any, ...] = (None, False, "", [], {})

_NO_EXPERTS = "there are no expert models in this version."
_ALWAYS_SAFETENSORS = "weights are written as safetensors, never pickled; leave it out."
_OWN_MODELS_ONLY = "no code that comes with a model is run; it must be of the Qwen3 or Llama family."
_NO_NCCL = "weights travel as files in this version, whatever is set here."
_NO_BENCH = "there is no benchmark mode; benchmarks/ measures speed."
_NO_SAMPLER = "the engine has no such sampling in this version; leave it out."
_NO_POOLS = (
    "tasks are not drawn by difficulty from a buffer in this version; leave it out (the orchestrator's "
    "`curriculum` and no_positive_resampling are built)."
)
_TORCH_FLASH = "torch's own flash attention is used on a GPU, whichever version of it is named."
_PINNED = "pinned memory is always used."
_ONE_STREAM = "every copy is waited for, in the order of the layers; leave it out."
_LOG_FILE = "the log file is always written."
_NO_VF_LEVEL = "has no effect in this version."
_NO_DATA_LOG = "rollouts/ holds the training data as text; nothing else is logged."

_LOG = _told(
    ("weight_broadcast.type", ("filesystem",), _NO_NCCL),
    ("log.vf_level", ("warn", "warning"), _NO_VF_LEVEL),
    ("log.file", (True, None), _LOG_FILE),
)
_LOG_DATA = _told(("log.log_data", _EMPTY, _NO_DATA_LOG))
_OWN_MODELS = _told(("model.trust_remote_code", _EMPTY, _OWN_MODELS_ONLY))

_TRAINER = (
    *_LOG,
    *_LOG_DATA,
    *_OWN_MODELS,
    *_refused(
        ("model.cp", (1,), "context parallelism is not available; set it to 1."),
        ("model.optimization_dtype", ("float32",), "weights are updated in float32; leave it out."),
        ("model.debug.num_layers", (None,), "`buckeye model tiny` makes small models; leave it out."),
        ("model.debug.random_init", _EMPTY, "`buckeye model tiny` makes random ones; leave it out."),
        ("data.fake", (None,), _NO_BENCH),
        ("bench", _EMPTY, _NO_BENCH),
        ("ckpt.weights.save_format", ("safetensors",), _ALWAYS_SAFETENSORS),
        (
            "weights.interval",
            (None,),
            "weights that no engine needs any more are deleted; checkpoints hold them too: use "
            "ckpt.interval.",
        ),
        ("weights.save_format", ("safetensors",), _ALWAYS_SAFETENSORS),
        ("weight_broadcast.save_format", ("safetensors",), _ALWAYS_SAFETENSORS),
        ("memory_profiler_path", (None,), "no memory profile is written in this version."),
        ("trace_path", (None,), "no trace is written in this version."),
    ),
    *_told(
        ("model.attn", ("flash_attention_2", "sdpa"), _TORCH_FLASH),
        ("model.ac_offloading.pin_memory", (True, None), _PINNED),
        ("model.ac_offloading.max_inflight_activations", (None,), _ONE_STREAM),
        ("model.ep", (1,), _NO_EXPERTS),
        ("model.impl", ("hf",), "the model of transformers is used in this version."),
        ("model.moe_use_grouped_mm", (True, None), _NO_EXPERTS),
    ),
)

_ORCHESTRATOR = (
    *_LOG,
    *_LOG_DATA,
    *_OWN_MODELS,
    *_refused(
        ("mask_env_responses", (True, None), "the environment's tokens are never trained on; leave it out."),
        ("client.headers", _EMPTY, "further headers are not sent in this version; leave it out."),
        (
            "client.server_type",
            ("vllm",),
            'training needs token ids from the server; only "vllm" (or the embedded engine) gives them.',
        ),
        ("sampling.repetition_penalty", (1.0,), _NO_SAMPLER),
        ("buffer.easy_fraction", _EMPTY, _NO_POOLS),
        ("buffer.hard_fraction", _EMPTY, _NO_POOLS),
        ("buffer.easy_threshold", (None,), _NO_POOLS),
        ("buffer.hard_threshold", (None,), _NO_POOLS),
        ("buffer.type", ("simple", "online-difficulty"), _NO_POOLS),
        ("buffer.oversampling_factor", (1.0,), "set the orchestrator's oversampling_factor instead."),
        ("buffer.seed", (None,), "the orchestrator's `seed` fixes all choices; set that."),
        ("buffer.from_scratch", (True, None), "a buffer comes back with its checkpoint only: set resume."),
        ("eval.sampling.repetition_penalty", (None, 1.0), _NO_SAMPLER),
        ("eval.sampling.min_p", (None, 0.0), _NO_SAMPLER),
        ("eval.sampling.reasoning_effort", (None,), _NO_SAMPLER),
        ("eval.sampling.seed", (None,), "the orchestrator's `seed` fixes evaluations too; set that."),
        ("eval.save.disk", (None,), "during training only the figures are kept; use `buckeye eval`."),
        ("eval.save.hf", (None,), "evaluations are not uploaded in this version."),
        ("eval.save.env_hub", _EMPTY, "evaluations are not uploaded in this version."),
        ("ckpt.buffer_path", (None,), "the buffer is part of the checkpoint; use ckpt.resume_step."),
        ("bench", _EMPTY, _NO_BENCH),
    ),
    *_told(
        (
            "strict_async_level",
            _EMPTY,
            "new weights are used at once; rollouts are as old as max_async_level allows, or younger. "
            "max_async_level = 0 is exact.",
        ),
    ),
)

_INFERENCE = _LOG

_EMBEDDED_ENGINE = (
    *_OWN_MODELS,
    *_refused(
        ("vllm", _EMPTY, 'only vLLM understands these: set inference.backend = "vllm".'),
        (
            "parallel.tp",
            (1,),
            "the embedded engine uses one device: set tp to 1 and dp to the number of devices (or use vLLM).",
        ),
        (
            "parallel.pp",
            (1,),
            'only vLLM spreads a model over several nodes: set inference.backend = "vllm".',
        ),
    ),
    *_told(
        (
            "model.tool_call_parser",
            (None,),
            "is vLLM's: the embedded engine reads tool calls as the model's chat template writes them.",
        ),
    ),
)

_PARTS: dict[KeyPath, type[BaseConfig]] = {
    ("trainer",): TrainerConfig,
    ("orchestrator",): OrchestratorConfig,
    ("inference",): InferenceConfig,
}

RULES: dict[type[BaseConfig], tuple[Rule, ...]] = {
    TrainerConfig: _TRAINER,
    SFTConfig: _TRAINER,
    OrchestratorConfig: _ORCHESTRATOR,
    InferenceConfig: _INFERENCE,
}


def rules_by_path(model: type[BaseConfig]) -> dict[KeyPath, Rule]:
    """What help has to say of settings: those of `RULES`, which hold whatever else is set."""
    rules: dict[KeyPath, Rule] = {}
    parts = _PARTS if model is RLConfig else {(): model}
    for prefix, part in parts.items():
        for rule in RULES.get(part, ()):
            rules[(*prefix, *rule.path.split("."))] = rule
    if model is RLConfig:
        for shared in shared_settings(model):
            rules.update((shared.path, rules[path]) for path in shared.members if path in rules)
    return rules


def check_supported(config: BaseConfig) -> list[Problem]:
    """Which settings ask for what this version does not do. A problem's path starts at `config`."""
    if isinstance(config, RLConfig):
        parts = [(path, getattr(config, str(path[0]))) for path in _PARTS]
        found = [p for path, part in parts if part is not None for p in _check(part, path)]
        return [*found, *_whole_run(config)]
    return list(_check(config, ()))


def _rules_for(config: BaseConfig) -> tuple[Rule, ...]:
    if isinstance(config, InferenceConfig) and config.backend != "vllm":
        return (*_INFERENCE, *_EMBEDDED_ENGINE)
    return RULES[type(config)]


def _learns_nothing(config: OrchestratorConfig, prefix: KeyPath) -> Iterator[Problem]:
    if min(config.group_sizes) == 1 and config.advantage is not None:
        message = (
            "is 1: a rollout without siblings has nothing to be compared with, so every advantage is 0 and "
        )
        message += "nothing is learned. Use e.g. 8 or 16."
        yield Problem(path=(*prefix, "rollouts_per_example"), message=message, level="warning")


def _all_at_once(config: OrchestratorConfig, prefix: KeyPath) -> Iterator[Problem]:
    """Limits that deterministic sampling cannot keep."""
    if config.max_async_level or config.deterministic is False:
        return
    why = "cannot be kept with max_async_level = 0, which plays all rollouts of a step at once"
    if config.max_concurrent is not None:
        path: KeyPath = (*prefix, "max_concurrent")
        yield Problem(path=path, message=f"{why}: it is ignored.", level="warning")
    evaluated = config.eval.env if config.eval is not None else []
    lists = (((*prefix, "env"), config.env), ((*prefix, "eval", "env"), evaluated))
    for place, environments in lists:
        for index, environment in enumerate(environments):
            if environment.max_concurrent is not None:
                message = f"{why}: leave it out, or set deterministic = false."
                yield Problem(path=(*place, index, "max_concurrent"), message=message)


def _adapters(config: TrainerConfig | SFTConfig, prefix: KeyPath) -> Iterator[Problem]:
    weights = config.ckpt.weights if config.ckpt is not None else None
    if config.model.experimental.lora is None:
        if weights is not None and weights.save_adapter_separately:
            message = "there is no adapter; set model.experimental.lora, or leave this out."
            yield Problem(path=(*prefix, "ckpt", "weights", "save_adapter_separately"), message=message)
    elif config.model.tp > 1:
        message = "adapters are not divided by tensor parallelism; leave tp at 1."
        yield Problem(path=(*prefix, "model", "tp"), message=message)


def _small_moments(config: TrainerConfig | SFTConfig, prefix: KeyPath) -> Iterator[Problem]:
    model = config.model
    divided = model.sharding == "full" or model.dp_replicate > 1 or model.tp > 1
    if config.optim.type == "adamw8bit" and divided:
        message = (
            "cannot update a model that is divided among ranks; use adamw, whose moments are divided too."
        )
        yield Problem(path=(*prefix, "optim", "type"), message=message)


def _whole_run(config: RLConfig) -> Iterator[Problem]:
    if config.inference is None:
        urls = ", ".join(config.orchestrator.client.base_url)
        message = (
            f"none is started; the orchestrator expects servers at {urls}. Add --inference to start them."
        )
        yield Problem(path=("inference",), message=message, level="warning")
    elif config.inference.backend == "vllm":
        lora = config.trainer.model.experimental.lora
        if lora is not None and lora.modules_to_save:
            path = ("trainer", "model", "experimental", "lora", "modules_to_save")
            message = 'vLLM\'s adapters are low-rank only; leave it out, or set inference.backend = "torch".'
            yield Problem(path=path, message=message)


def _check(config: BaseConfig, prefix: KeyPath) -> Iterator[Problem]:
    for rule in _rules_for(config):
        path = tuple(rule.path.split("."))
        if any(rule.matters(value) for value in _asked_for(config, path)):
            yield Problem(path=prefix + path, message=rule.message, level=rule.level)
    if isinstance(config, OrchestratorConfig):
        yield from _learns_nothing(config, prefix)
        yield from _all_at_once(config, prefix)
    elif isinstance(config, TrainerConfig | SFTConfig):
        yield from _adapters(config, prefix)
        yield from _small_moments(config, prefix)


def _asked_for(config: Any, path: Sequence[str]) -> Iterator[Any]:
    """The value at `path`. None where a section is off or of a variant without it, and for a default, which
    asks for nothing; choosing a variant does."""
    *above, name = path
    for key in above:
        config = getattr(config, key, None)
    field = type(config).model_fields.get(name) if isinstance(config, BaseConfig) else None
    if field is not None and (name == "type" or getattr(config, name) != field.default):
        yield getattr(config, name)
