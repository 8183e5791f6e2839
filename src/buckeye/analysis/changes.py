"""How far a learning rate moves the policy: kept batches are trained on again, with another rate."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from buckeye.analysis.replay.retrain import masked_logprobs, trainer_from
from buckeye.base.storage import step_directories
from buckeye.transport.batches import read_trained

_SAMPLES = 32
_LARGEST = 2.0  # nats


def policy_changes(run: Path, rate: float, most: int | None = None) -> list[float]:
    """Train on the batches that the run in `run` has kept, or on the first `most` of them, from where it
    began, with another learning rate: after each step by how much the policy has changed, in nats a token,
    as half the mean square of what its log-probs changed by. While that is small it is the KL divergence;
    large changes of single tokens are cut off, as a few of them would decide. Ends with a NaN where the model
    breaks. The run stays as it is."""
    steps, found = list(step_directories(run / "trained"))[:most], list[float]()
    with trainer_from(run, steps[0], rate) as trainer:
        policy = trainer.learner.policy
        for step in steps:
            batch = read_trained(run / "trained", step)[0]
            samples = [sample for sample in batch.samples if sample.loss_mask.any()][:_SAMPLES]
            before = np.concatenate(masked_logprobs(policy, samples))
            trainer.train(batch)
            after = np.concatenate(masked_logprobs(policy, samples))
            moved = np.clip(after - before, -_LARGEST, _LARGEST)
            found.append(float(np.mean(np.square(moved))) / 2)
            if not math.isfinite(found[-1]):
                break
    return found
