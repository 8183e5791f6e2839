"""What a trainer leaves on disk: versions of the weights, and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from buckeye.checkpoint import prune_checkpoints, save_checkpoint
from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.process import RunIdentity
from buckeye.trainer.canary import greedy_canary
from buckeye.trainer.export import save_model
from buckeye.trainer.learner import Learner
from buckeye.transport.weights import prune_weights, publish_weights

logger = logging.getLogger(__name__)


class Output:
    """Writes `weights/` and `checkpoints/` of a run, from the first rank only.

    `interval` is the number of steps between checkpoints (None: only when asked), `keep` how many remain
    (None: all).
    """

    def __init__(
        self,
        output_dir: Path,
        learner: Learner,
        identity: RunIdentity,
        *,
        interval: int | None,
        keep: int | None,
    ) -> None:
        self._weights = output_dir / "weights"
        self._checkpoints = output_dir / "checkpoints"
        self._learner = learner
        self._identity = identity
        self._interval = interval
        self._keep = keep
        self._saved = learner.progress.step

    @classmethod
    def of(cls, config: TrainerConfig | SFTConfig, learner: Learner, identity: RunIdentity) -> Output:
        """The output of a configured run."""
        interval, keep = (config.ckpt.interval, config.ckpt.keep) if config.ckpt else (None, None)
        return cls(config.output_dir, learner, identity, interval=interval, keep=keep)

    def publish(self, *, versions: int) -> None:
        """Make the present weights visible to the engines; only the newest `versions` remain."""
        if not self._learner.ranks.first:
            return
        policy, step = self._learner.policy, self._learner.progress.step
        dtype = policy.compute_dtype
        publish_weights(
            self._weights,
            step,
            lambda directory: save_model(policy.model, self._learner.tokenizer_files, directory, dtype=dtype),
            identity=self._identity,
            dtype=str(dtype).removeprefix("torch."),
            canary=greedy_canary(policy),
        )
        prune_weights(self._weights, self._identity.run_id, keep=lambda v: step - versions < v <= step)

    def due(self) -> bool:
        """Whether a checkpoint is to be written after the step that was just done."""
        return self._interval is not None and self._learner.progress.step % self._interval == 0

    def checkpoint(self, orchestrator_state: Mapping[str, Any]) -> None:
        """Commit the present state, unless this process has committed it, or started from it."""
        step = self._learner.progress.step
        if step == self._saved or not self._learner.ranks.first:
            return
        logger.info("Saving checkpoint at step %d", step)
        save_checkpoint(
            self._checkpoints,
            step,
            self._learner.save,
            orchestrator_state=orchestrator_state,
            identity=self._identity,
        )
        self._saved = step
        if self._keep is not None:
            prune_checkpoints(self._checkpoints, self._keep)
