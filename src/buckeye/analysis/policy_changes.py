"""Effect of a learning rate on the policy: kept batches are trained on again, with another rate."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from buckeye.analysis.replay.retrain import masked_logprobs, trainer_from
from buckeye.base.storage import step_directories
from buckeye.transport.batches import read_trained_batch

_MAX_SAMPLES = 32
_MAX_CHANGE = 2.0  # nats


def measure_policy_changes(run: Path, rate: float, max_batches: int | None = None) -> list[float]:
    """Train again on the batches kept in `run`, with another learning rate, and return the policy changes.

    Training starts from the newest checkpoint at or before the first kept batch, else from the initial model.
    It uses all kept batches, or the first `max_batches`.

    A policy change is half the mean squared change of the log-probs in a step, in nats per token. For small
    values, it approximates the KL divergence. Large changes of single tokens are clipped, as a few could
    dominate. The list ends with NaN if the model breaks. The run itself is not changed.
    """
    steps, found = list(step_directories(run / "trained"))[:max_batches], list[float]()
    with trainer_from(run, steps[0], rate) as trainer:
        policy = trainer.learner.policy
        for step in steps:
            batch = read_trained_batch(run / "trained", step)[0]
            samples = [sample for sample in batch.samples if sample.loss_mask.any()][:_MAX_SAMPLES]
            before = np.concatenate(masked_logprobs(policy, samples))
            trainer.train(batch)
            after = np.concatenate(masked_logprobs(policy, samples))
            moved = np.clip(after - before, -_MAX_CHANGE, _MAX_CHANGE)
            found.append(float(np.mean(np.square(moved))) / 2)
            if not math.isfinite(found[-1]):
                break
    return found
