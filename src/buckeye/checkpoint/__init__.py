"""Checkpoints: `<output_dir>/checkpoints/step_<N>/`, committed in one step, found by one resolver."""

from buckeye.checkpoint.commit import (
    read_orchestrator_state,
    save_checkpoint,
    trainer_state,
    verify_checkpoint,
)
from buckeye.checkpoint.find import (
    CheckpointInfo,
    checkpoints_by_age,
    list_checkpoints,
    prune_checkpoints,
    resolve_checkpoint,
)

__all__ = [
    "CheckpointInfo",
    "checkpoints_by_age",
    "list_checkpoints",
    "prune_checkpoints",
    "read_orchestrator_state",
    "resolve_checkpoint",
    "save_checkpoint",
    "trainer_state",
    "verify_checkpoint",
]
