"""Training state in checkpoints: a copy in memory, its files, and their loading on any number of ranks.

The trainer's directory of a checkpoint has `model/` (Hugging Face, float32) or `adapter/` (peft),
`optimizer.safetensors`, `random.safetensors` and `progress.json`. If the model is sharded, `optimizer/` has
one file per rank instead of `optimizer.safetensors`.
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
    """Copy of the training state after a step, in main memory.

    On rank 0, `model` has the unsharded tensors by name; on other ranks it is empty. With `is_sharded`,
    `optimizer` has the shards of this rank; otherwise it is like `model`. `random` has the states of the
    random generators of all ranks.
    """

    progress: TrainingProgress
    random: Mapping[str, Tensor]
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    is_sharded: bool


def capture_state(learner: Learner) -> TrainingState:
    """Copy the current training state to main memory. All ranks must call this function."""
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
    """Write the files of a captured state, except the shards of the optimizer. Only rank 0 calls this."""
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
    """Restore optimizer, random generators and progress from the trainer's directory of a checkpoint.

    A different number of ranks may have written the checkpoint. With `skip_data`, training starts at the
    beginning of the data.
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
    """Read the optimizer's state, or this rank's shards of it."""
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
    """Restore the random generators of this rank. Skip a generator of a device that is not in use now.

    If the checkpoint is from fewer ranks, several ranks restore the same state.
    """
    stored_ranks = 1 + max(int(key.partition("/")[0]) for key in states)
    rank = ranks.rank % stored_ranks
    torch.set_rng_state(states[f"{rank}/cpu"])
    if device.type == "cuda" and f"{rank}/cuda" in states:
        torch.cuda.set_rng_state(states[f"{rank}/cuda"], device)
