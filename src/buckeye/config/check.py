"""What a valid configuration may still get wrong: settings that contradict each other, or do nothing yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from buckeye.config.base import BaseConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rl import RLConfig


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with a valid configuration. Errors stop a run; warnings are shown."""

    level: Literal["error", "warning"]
    message: str


def check(config: BaseConfig) -> list[Finding]:
    """Everything wrong with a configuration, its sections included."""
    findings = _unsupported(config, "")
    if isinstance(config, RLConfig):
        findings += _check_orchestrator(config.orchestrator, "orchestrator.")
        findings += _check_run(config)
    if isinstance(config, OrchestratorConfig):
        findings += _check_orchestrator(config, "")
    return findings


def _check_run(config: RLConfig) -> list[Finding]:
    findings = []
    if config.trainer.seq_len < config.orchestrator.seq_len:
        findings.append(
            Finding(
                "error",
                f"trainer.seq_len {config.trainer.seq_len} is smaller than orchestrator.seq_len "
                f"{config.orchestrator.seq_len}: the longest samples would not fit into a micro-batch",
            )
        )
    return findings


def _check_orchestrator(config: OrchestratorConfig, prefix: str) -> list[Finding]:
    findings = []
    if not config.env:
        findings.append(
            Finding("error", f'{prefix}env: no environment to train on; add\n  [[env]]\n  id = "owner/name"')
        )
    size, group = config.batch_size, config.rollouts_per_example
    if size % group:
        findings.append(
            Finding(
                "error",
                f"{prefix}batch_size {size} is not divisible by rollouts_per_example {group}; "
                f"e.g. batch_size = {max(size // group, 1) * group}",
            )
        )
    if group == 1 and config.advantage is not None:
        findings.append(
            Finding(
                "warning",
                f"{prefix}rollouts_per_example = 1: a group of one has no siblings to compare with, so every "
                "advantage is 0 and nothing is learned; use 8 or 16",
            )
        )
    if config.sampling.top_p != 1.0 or config.sampling.top_k not in (-1, 0):
        findings.append(
            Finding(
                "error",
                f"{prefix}sampling: top_p and top_k cut off tokens that the trainer still gives probability to, "
                "which biases the importance ratios. Train with top_p = 1.0 and top_k = -1; truncate in "
                "[eval.sampling] if you like",
            )
        )
    if config.sampling.temperature == 0.0:
        findings.append(
            Finding(
                "error",
                f"{prefix}sampling.temperature = 0: all rollouts of a group would be the same; use 1.0",
            )
        )
    return findings


_Holds = Callable[[Any], bool]
_NOT_BUILT: list[tuple[str, _Holds, Literal["error", "warning"], str]] = [
    ("model.tp", lambda v: v > 1, "error", "tensor parallelism is not built yet; use 1"),
    ("model.cp", lambda v: v > 1, "error", "context parallelism is not built yet; use 1"),
    ("model.ep", lambda v: v > 1, "error", "expert parallelism is not built yet; use 1"),
    ("model.dp_replicate", lambda v: v > 1, "error", "sharded data parallelism is not built yet; use 1"),
    ("model.experimental.lora", bool, "error", "LoRA is not built yet; leave it out"),
    ("model.debug.num_layers", bool, "error", "not built; make a smaller model with `buckeye model tiny`"),
    ("model.debug.random_init", bool, "error", "not built; `buckeye model tiny` makes random models"),
    ("model.trust_remote_code", bool, "error", "code that comes with a model is not run; leave it out"),
    ("model.optimization_dtype", lambda v: v != "float32", "error", "weights are optimised in float32 only"),
    ("model.reduce_dtype", lambda v: v != "float32", "error", "gradients are summed in float32 only"),
    ("model.impl", lambda v: v != "hf", "warning", "there is one implementation, hf; this is ignored"),
    ("model.fsdp_cpu_offload", bool, "warning", "nothing is offloaded yet; this is ignored"),
    ("model.ac_offloading", bool, "warning", "nothing is offloaded yet; this is ignored"),
    ("model.load_using_meta", bool, "warning", "models are loaded directly; this is ignored"),
    ("weight_broadcast.type", lambda v: v == "nccl", "error", "weights go through files; use filesystem"),
    ("weight_broadcast.save_format", lambda v: v != "safetensors", "error", "weights are safetensors only"),
    ("weights.save_format", lambda v: v != "safetensors", "error", "weights are safetensors only"),
    ("weights.interval", bool, "error", "checkpoints keep the weights; set ckpt.interval"),
    ("ckpt.weights.save_format", lambda v: v != "safetensors", "error", "weights are safetensors only"),
    ("data.fake", bool, "error", "training on random tokens is what benchmarks/ is for; leave it out"),
    ("bench", bool, "error", "measuring speed is what benchmarks/ is for; leave it out"),
    ("memory_profiler_path", bool, "error", "memory profiles are not built yet; leave it out"),
    ("trace_path", bool, "error", "traces are not built yet; leave it out"),
    ("wandb", bool, "error", "Weights & Biases is not built yet; metrics.jsonl in the run directory has it all"),
    ("log.log_data", bool, "warning", "rollouts/ holds every sample; nothing more is logged"),
    ("sampling.repetition_penalty", lambda v: v not in (None, 1.0), "error", "penalties are not built; use 1.0"),
    ("eval.save.hf", bool, "error", "results are not pushed anywhere; leave it out"),
    ("eval.save.env_hub", bool, "error", "results are not pushed anywhere; leave it out"),
    ("client.headers", bool, "error", "further headers are not sent; leave them out"),
    ("client.server_type", lambda v: v != "vllm", "error", "the engines speak vLLM's protocol; use vllm"),
    ("buffer.type", lambda v: v == "difficulty-pool", "error", "difficulty pools are not built; use simple"),
    ("buffer.easy_fraction", bool, "error", "difficulty pools are not built; use 0"),
    ("buffer.hard_fraction", bool, "error", "difficulty pools are not built; use 0"),
    ("mask_env_responses", lambda v: not v, "error", "tokens of the environment are never trained on"),
    ("env_mix.strategy", lambda v: v != "interleave", "error", "environments are interleaved by their ratios"),
    ("env_mix.probabilities", bool, "error", "give each [[env]] a ratio instead"),
    ("env_mix.stopping_strategy", lambda v: v != "all_exhausted", "error", "tasks are dealt again when they run out"),
    ("parallel.tp", lambda v: v > 1, "error", "an engine runs on one device; use more replicas (dp)"),
    ("backend", lambda v: v == "vllm", "error", "the vLLM backend is not built yet; use torch"),
    ("vllm", bool, "error", "the vLLM backend is not built yet; leave its settings out"),
    ("model.enable_auto_tool_choice", bool, "error", "tool calls are not parsed yet; leave it out"),
]  # fmt: skip


def _unsupported(config: BaseConfig, prefix: str) -> list[Finding]:
    """Settings that are accepted by name and not built; see `_NOT_BUILT`."""
    sections = {prefix: config}
    if isinstance(config, RLConfig):
        sections = {
            "trainer.": config.trainer,
            "orchestrator.": config.orchestrator,
            **({"inference.": config.inference} if config.inference is not None else {}),
        }
    findings = []
    for where, section in sections.items():
        for path, holds, level, sentence in _NOT_BUILT:
            value = _at(section, path)
            if value is not None and holds(value):
                findings.append(Finding(level, f"{where}{path}: {sentence}"))
    return findings


def _at(section: Any, path: str) -> Any:
    for key in path.split("."):
        section = getattr(section, key, None)
    return section
