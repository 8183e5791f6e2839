"""What a trainer leaves on disk: versions of the weights, and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from buckeye.checkpoint import prune_checkpoints, save_checkpoint
from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.process import RunIdentity
from buckeye.trainer.adapter import has_adapter, save_weights
from buckeye.trainer.canary import greedy_canary
from buckeye.trainer.learner import Learner
from buckeye.transport.weights import prune_weights, publish_weights

logger = logging.getLogger(__name__)


class Output:
    """Writes `weights/` and `checkpoints/` of a run, from the first rank; all ranks must call its methods.

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
        learner, policy, step = self._learner, self._learner.policy, self._learner.progress.step
        adapter = has_adapter(policy.model)
        dtype = torch.float32 if adapter else policy.compute_dtype
        canary = greedy_canary(policy)
        tensors = learner.model_tensors(dtype)
        if not learner.ranks.first:
            return
        publish_weights(
            self._weights,
            step,
            lambda directory: save_weights(
                policy.model, learner.tokenizer_files, directory, dtype=dtype, tensors=tensors
            ),
            identity=self._identity,
            dtype=str(dtype).removeprefix("torch."),
            canary=canary,
            adapter=adapter,
        )
        prune_weights(self._weights, self._identity.run_id, keep=lambda v: step - versions < v <= step)

    def due(self) -> bool:
        """Whether a checkpoint is to be written after the step that was just done."""
        return self._interval is not None and self._learner.progress.step % self._interval == 0

    def checkpoint(self, loop_state: Mapping[str, Any], *, protected: Collection[int] = ()) -> None:
        """Commit the present state, unless this process has committed it, or started from it. `loop_state`
        is what the loop needs to go on; checkpoints of `protected` steps are never deleted."""
        step = self._learner.progress.step
        if step == self._saved:
            return
        self._saved = step
        captured = self._learner.capture()
        if not self._learner.ranks.first:
            return
        logger.info("Saving checkpoint at step %d", step)
        save_checkpoint(
            self._checkpoints,
            step,
            lambda directory: self._learner.save(directory, captured),
            orchestrator_state=loop_state,
            identity=self._identity,
        )
        if self._keep is not None:
            prune_checkpoints(self._checkpoints, self._keep, protected=protected)
