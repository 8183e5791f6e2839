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
    first_whole,
    list_checkpoints,
    prune_checkpoints,
    resolve_checkpoint,
    usable_checkpoint,
)
from buckeye.checkpoint.scores import Score, best_by_reward, read_scores, scores_of

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
