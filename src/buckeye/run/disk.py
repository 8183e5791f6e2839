"""How much disk a run will need, from the model's real size and the settings that keep files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rl import RLConfig
from buckeye.config.trainer import LoRAConfig

_BYTES_PER_ROLLOUT_TOKEN = 6  # measured on rollouts/*.jsonl: text and the JSON around it
_BYTES_PER_EVALUATED_ROLLOUT = 1_000  # of evals/*/*.jsonl, which hold no text
_TASKS_OF_A_SPLIT = 2_000  # taken for "all of them": how many there are, only the environment knows


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskEstimate:
    """Bytes by kind at the worst moment of the run; None where the model's size is not known yet. `rollouts`
    are those of training and of evaluations."""

    weights: int | None
    checkpoints: int | None
    rollouts: int | None

    @property
    def total(self) -> int | None:
        parts = (self.weights, self.checkpoints, self.rollouts)
        return None if None in parts else sum(p for p in parts if p is not None)


def estimate_disk(config: RLConfig, model_path: Path | None) -> DiskEstimate:
    """Weights: fp32 or bf16 copies for the versions in use. Checkpoints: fp32 weights and two Adam moments,
    for every one that is kept. Both are of an adapter alone where one is trained. Rollouts: up to `seq_len`
    tokens a sample for all steps, and a record of every evaluated one (None without `max_steps`)."""
    orchestrator, trainer = config.orchestrator, config.trainer
    rollouts = None
    if orchestrator.max_steps is not None:
        tokens = orchestrator.max_steps * orchestrator.batch_size * orchestrator.seq_len
        rollouts = tokens * _BYTES_PER_ROLLOUT_TOKEN
        rollouts += _evaluated_rollouts(orchestrator, orchestrator.max_steps) * _BYTES_PER_EVALUATED_ROLLOUT
    lora = trainer.model.experimental.lora
    parameters = _count_trained(model_path, lora) if model_path is not None else None
    if parameters is None:
        return DiskEstimate(weights=None, checkpoints=None, rollouts=rollouts)
    bytes_per_weight = 2 if trainer.model.device == "cuda" and lora is None else 4
    versions = trainer.max_async_level + 3
    return DiskEstimate(
        weights=versions * bytes_per_weight * parameters,
        checkpoints=_kept_checkpoints(config) * 3 * 4 * parameters,
        rollouts=rollouts,
    )


def _evaluated_rollouts(orchestrator: OrchestratorConfig, max_steps: int) -> int:
    """How many rollouts all evaluations of a run play: at the start, every `interval` steps, at the end."""
    settings = orchestrator.eval
    if settings is None:
        return 0
    once = 0
    for env in settings.env:
        examples = settings.num_examples if env.num_examples is None else env.num_examples
        tasks = _TASKS_OF_A_SPLIT if examples < 0 else examples
        once += tasks * (env.rollouts_per_example or settings.rollouts_per_example)
    return once * (2 + max_steps // settings.interval)


def _kept_checkpoints(config: RLConfig) -> int:
    ckpt, max_steps = config.trainer.ckpt, config.trainer.max_steps
    if ckpt is None or ckpt.interval is None:
        return 1
    written = 1 + (max_steps or 1000) // ckpt.interval
    return min(written, ckpt.keep + 1) if ckpt.keep is not None else written


def count_parameters(model_path: Path) -> int | None:
    """Parameters of a local model, from the headers of its safetensors files; None if it has none."""
    return sum(map(math.prod, tensor_shapes(model_path).values())) or None


def _count_trained(model_path: Path, lora: LoRAConfig | None) -> int | None:
    """Parameters that the optimizer updates: all, or those of an adapter."""
    if lora is None:
        return count_parameters(model_path)
    total = 0
    for name, shape in tensor_shapes(model_path).items():
        module = name.rpartition(".")[0]
        if _is_one_of(module, lora.modules_to_save):
            total += math.prod(shape)
        elif len(shape) == 2 and _is_one_of(module, lora.target_modules):
            total += lora.rank * sum(shape)
    return total or None


def _is_one_of(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith("." + name) for name in names)


def tensor_shapes(model_path: Path) -> dict[str, list[int]]:
    """Name -> shape of every tensor in a directory's safetensors files."""
    shapes: dict[str, list[int]] = {}
    for file in model_path.glob("*.safetensors"):
        with file.open("rb") as handle:
            header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return shapes


def human_bytes(count: int | None) -> str:
    """12.3 GB; "unknown" for None."""
    if count is None:
        return "unknown"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.1f} {unit}" if unit != "B" else f"{count} B"
        value /= 1000
    return f"{value:.1f} TB"
