"""Checkpoints: `<output_dir>/checkpoints/step_<N>/`, committed in one step, found by one resolver."""

from buckeye.transport.checkpoint.find import (
    CheckpointInfo,
    Score,
    best_by_reward,
    checkpoints_by_age,
    first_whole,
    list_checkpoints,
    prune_checkpoints,
    read_orchestrator_state,
    read_scores,
    resolve_checkpoint,
    save_checkpoint,
    scores_of,
    trainer_state,
    usable_checkpoint,
    verify_checkpoint,
)

__all__ = [
    "CheckpointInfo",
    "Score",
    "best_by_reward",
    "checkpoints_by_age",
    "first_whole",
    "list_checkpoints",
    "prune_checkpoints",
    "read_orchestrator_state",
    "read_scores",
    "resolve_checkpoint",
    "save_checkpoint",
    "scores_of",
    "trainer_state",
    "usable_checkpoint",
    "verify_checkpoint",
]
