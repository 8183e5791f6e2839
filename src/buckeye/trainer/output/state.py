"""Training state: captured in memory, written later, and read by any number of ranks.

The trainer's part of a checkpoint has `model/` (Hugging Face, float32) or `adapter/` (peft),
`optimizer.safetensors`, `random.safetensors` and `progress.json`. If the model is sharded, the optimizer is
in `optimizer/`, one file per rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from buckeye.base.faults import fault_point
from buckeye.errors import CheckpointError
from buckeye.trainer.learner import Learner, TrainingProgress
from buckeye.trainer.model.adapter_files import ADAPTER_DIRECTORY, has_adapter, save_weights
from buckeye.trainer.parallel.fsdp import gather_tensors, shard_like
from buckeye.trainer.parallel.ranks import Ranks
from buckeye.trainer.parallel.shards import copy_to_cpu, is_model_sharded, load_shards
from buckeye.transport.checkpoint import MODEL_DIRECTORY

OPTIMIZER_DIRECTORY = "optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """Training state after a step, in main memory.

    `model` has unsharded tensors by name, on rank 0. `optimizer` has unsharded tensors on rank 0, or, with
    `is_sharded`, this rank's shards. `random` has the generator states of all ranks.
    """

    progress: TrainingProgress
    random: Mapping[str, Tensor]
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    is_sharded: bool


def capture_state(learner: Learner) -> TrainingState:
    """Copy the current state, so that training can continue. All ranks must call it."""
    random = _gather_random_states(learner.ranks, learner.policy.device)
    model, optimizer = learner.local_tensors(), learner.optimizer.state()
    is_sharded = is_model_sharded(learner.ranks) and not has_adapter(learner.policy.model)
    keep = learner.ranks.is_rank_zero
    return TrainingState(
        progress=learner.progress,
        random=random,
        model=gather_tensors(model, keep=keep, dtype=torch.float32, copy=True),
        optimizer=copy_to_cpu(optimizer) if is_sharded else gather_tensors(optimizer, keep=keep, copy=True),
        is_sharded=is_sharded,
    )


def write_state(learner: Learner, directory: Path, captured: TrainingState) -> None:
    """Write rank 0's files of a captured state: everything except the optimizer's shards."""
    model, tokenizer = learner.policy.model, learner.tokenizer_files
    name = ADAPTER_DIRECTORY if has_adapter(model) else MODEL_DIRECTORY
    save_weights(model, tokenizer, directory / name, dtype=torch.float32, tensors=captured.model)
    fault_point("checkpoint.files")
    if not captured.is_sharded:
        save_file(dict(captured.optimizer), directory / "optimizer.safetensors")
    save_file(dict(captured.random), directory / "random.safetensors")
    progress = json.dumps(asdict(captured.progress))
    (directory / "progress.json").write_text(progress, encoding="utf-8")


def load_state(learner: Learner, directory: Path, *, skip_data: bool = False) -> None:
    """Restore the state of a checkpoint's trainer part, except the model.

    The checkpoint may be from a different number of ranks.

    With `skip_data` the data starts from its beginning.
    """
    try:
        progress = TrainingProgress(**json.loads((directory / "progress.json").read_text(encoding="utf-8")))
        learner.optimizer.load_state(_read_optimizer(learner, directory))
        _restore_random_states(
            load_file(directory / "random.safetensors"), learner.ranks, learner.policy.device
        )
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"the trainer state in {directory} cannot be read: {error}",
            code="BK-CHECKPOINT-DAMAGED",
            hint="resume from another step",
        ) from error
    learner.progress = replace(progress, data_position=0) if skip_data else progress


def _read_optimizer(learner: Learner, directory: Path) -> dict[str, Tensor]:
    """Return this rank's part of the optimizer's state, read one tensor at a time."""
    parameters = learner.policy.trainable
    shards = directory / OPTIMIZER_DIRECTORY
    if shards.is_dir():
        return load_shards(shards, lambda name: parameters.get(name.rpartition("/")[0]))
    with safe_open(directory / "optimizer.safetensors", "pt") as file:
        tensors = ((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118, not a mapping
        return {key: shard_like(tensor, parameters.get(key.rpartition("/")[0])) for key, tensor in tensors}


def _gather_random_states(ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {
        f"{rank}/{name}": state
        for name, tensor in states.items()
        for rank, state in enumerate(ranks.all_gather(tensor))
    }


def _restore_random_states(states: Mapping[str, Tensor], ranks: Ranks, device: torch.device) -> None:
    """Restore each rank's own generators, possibly on another kind of device.

    If the run now has more ranks, several ranks restore one state.
    """
    stored_ranks = 1 + max(int(key.partition("/")[0]) for key in states)
    rank = ranks.rank % stored_ranks
    torch.set_rng_state(states[f"{rank}/cpu"])
    if device.type == "cuda" and f"{rank}/cuda" in states:
        torch.cuda.set_rng_state(states[f"{rank}/cuda"], device)
