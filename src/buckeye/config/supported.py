"""Settings that are accepted by name and not built in this version: what is refused, what is only said.

An error where ignoring the setting would change results or break a promise; a warning where it is about speed
or memory only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from buckeye.config.environments import EvalsConfig
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
    """`matters(value)` says whether the value of the setting asks for what is not built."""

    path: str
    matters: Callable[[Any], bool]
    level: Level
    message: str


def _is_set(value: Any) -> bool:
    return bool(value)


def _is_off(value: Any) -> bool:
    return value is False


def _is_given(value: Any) -> bool:
    return value is not None


def _more_than_one(value: Any) -> bool:
    return bool(value > 1)


def _is_not(*built: Any) -> Callable[[Any], bool]:
    return lambda value: value not in built


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

_TRAINER = (
    Rule("model.attn", _is_not("flash_attention_2", "sdpa"), "warning", _TORCH_FLASH),
    Rule("model.ac_offloading.pin_memory", _is_off, "warning", _PINNED),
    Rule("model.ac_offloading.max_inflight_activations", _is_given, "warning", _ONE_STREAM),
    Rule("model.trust_remote_code", _is_set, "warning", _OWN_MODELS_ONLY),
    Rule("model.ep", _more_than_one, "warning", _NO_EXPERTS),
    Rule("model.cp", _more_than_one, "error", "context parallelism is not available; set it to 1."),
    Rule("model.impl", _is_not("hf"), "warning", "the model of transformers is used in this version."),
    Rule(
        "model.optimization_dtype",
        _is_not("float32"),
        "error",
        "weights are updated in float32; leave it out.",
    ),
    Rule("model.moe_use_grouped_mm", _is_off, "warning", _NO_EXPERTS),
    Rule(
        "model.debug.num_layers", _is_given, "error", "`buckeye model tiny` makes small models; leave it out."
    ),
    Rule(
        "model.debug.random_init", _is_set, "error", "`buckeye model tiny` makes random ones; leave it out."
    ),
    Rule("data.fake", _is_given, "error", _NO_BENCH),
    Rule("bench", _is_set, "error", _NO_BENCH),
    Rule("ckpt.weights.save_format", _is_not("safetensors"), "error", _ALWAYS_SAFETENSORS),
    Rule(
        "weights.interval",
        _is_given,
        "error",
        "weights that no engine needs any more are deleted; checkpoints hold them too: use ckpt.interval.",
    ),
    Rule("weights.save_format", _is_not("safetensors"), "error", _ALWAYS_SAFETENSORS),
    Rule("weight_broadcast.save_format", _is_not("safetensors"), "error", _ALWAYS_SAFETENSORS),
    Rule("weight_broadcast.type", _is_not("filesystem"), "warning", _NO_NCCL),
    Rule("log.vf_level", _is_not("warn", "warning"), "warning", _NO_VF_LEVEL),
    Rule("log.file", _is_off, "warning", _LOG_FILE),
    Rule(
        "log.log_data",
        _is_set,
        "warning",
        "rollouts/ holds the training data as text; nothing else is logged.",
    ),
    Rule("memory_profiler_path", _is_given, "error", "no memory profile is written in this version."),
    Rule("trace_path", _is_given, "error", "no trace is written in this version."),
)

_ORCHESTRATOR = (
    Rule(
        "strict_async_level",
        _is_set,
        "warning",
        "new weights are used at once; rollouts are as old as max_async_level allows, or younger. "
        "max_async_level = 0 is exact.",
    ),
    Rule(
        "mask_env_responses", _is_off, "error", "the environment's tokens are never trained on; leave it out."
    ),
    Rule("model.trust_remote_code", _is_set, "warning", _OWN_MODELS_ONLY),
    Rule("client.headers", _is_set, "error", "further headers are not sent in this version; leave it out."),
    Rule(
        "client.server_type",
        _is_not("vllm"),
        "error",
        'training needs token ids from the server; only "vllm" (or the embedded engine) gives them.',
    ),
    Rule("sampling.repetition_penalty", _is_not(1.0), "error", _NO_SAMPLER),
    Rule("buffer.easy_fraction", _is_set, "error", _NO_POOLS),
    Rule("buffer.hard_fraction", _is_set, "error", _NO_POOLS),
    Rule("buffer.easy_threshold", _is_given, "error", _NO_POOLS),
    Rule("buffer.hard_threshold", _is_given, "error", _NO_POOLS),
    Rule("buffer.type", _is_not("simple", "online-difficulty"), "error", _NO_POOLS),
    Rule(
        "buffer.oversampling_factor",
        _is_not(1.0),
        "error",
        "set the orchestrator's oversampling_factor instead.",
    ),
    Rule("buffer.seed", _is_given, "error", "the orchestrator's `seed` fixes all choices; set that."),
    Rule(
        "buffer.from_scratch", _is_off, "error", "a buffer comes back with its checkpoint only: set resume."
    ),
    Rule("eval.sampling.repetition_penalty", _is_not(None, 1.0), "error", _NO_SAMPLER),
    Rule("eval.sampling.min_p", _is_not(None, 0.0), "error", _NO_SAMPLER),
    Rule("eval.sampling.reasoning_effort", _is_given, "error", _NO_SAMPLER),
    Rule(
        "eval.sampling.seed", _is_given, "error", "the orchestrator's `seed` fixes evaluations too; set that."
    ),
    Rule("eval.save.disk", _is_given, "error", "during training only the figures are kept; use `evals`."),
    Rule("eval.save.hf", _is_given, "error", "evaluations are not uploaded in this version."),
    Rule("eval.save.env_hub", _is_set, "error", "evaluations are not uploaded in this version."),
    Rule(
        "ckpt.buffer_path", _is_given, "error", "the buffer is part of the checkpoint; use ckpt.resume_step."
    ),
    Rule("weight_broadcast.type", _is_not("filesystem"), "warning", _NO_NCCL),
    Rule("log.vf_level", _is_not("warn", "warning"), "warning", _NO_VF_LEVEL),
    Rule("log.file", _is_off, "warning", _LOG_FILE),
    Rule(
        "log.log_data",
        _is_set,
        "warning",
        "rollouts/ holds the training data as text; nothing else is logged.",
    ),
    Rule("bench", _is_set, "error", _NO_BENCH),
)

_INFERENCE = (
    Rule("weight_broadcast.type", _is_not("filesystem"), "warning", _NO_NCCL),
    Rule("log.vf_level", _is_not("warn", "warning"), "warning", _NO_VF_LEVEL),
    Rule("log.file", _is_off, "warning", _LOG_FILE),
)

_EMBEDDED_ENGINE = (
    Rule("vllm", _is_set, "error", 'only vLLM understands these: set inference.backend = "vllm".'),
    Rule(
        "parallel.tp",
        _more_than_one,
        "error",
        "the embedded engine uses one device: set tp to 1 and dp to the number of devices (or use vLLM).",
    ),
    Rule("model.trust_remote_code", _is_set, "warning", _OWN_MODELS_ONLY),
    Rule(
        "model.tool_call_parser",
        _is_given,
        "warning",
        "is vLLM's: the embedded engine reads tool calls as the model's chat template writes them.",
    ),
)

_EVALS = (
    Rule("model.trust_remote_code", _is_set, "warning", _OWN_MODELS_ONLY),
    Rule("client.headers", _is_set, "error", "further headers are not sent in this version; leave it out."),
    Rule("client.server_type", _is_not("vllm"), "error", 'token ids are needed; only "vllm" gives them.'),
    Rule("sampling.repetition_penalty", _is_not(None, 1.0), "error", _NO_SAMPLER),
    Rule("sampling.min_p", _is_not(None, 0.0), "error", _NO_SAMPLER),
    Rule("sampling.reasoning_effort", _is_given, "error", _NO_SAMPLER),
    Rule("sampling.seed", _is_given, "error", "set `seed`."),
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
    EvalsConfig: _EVALS,
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
    """Limits that lockstep sampling cannot keep."""
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
