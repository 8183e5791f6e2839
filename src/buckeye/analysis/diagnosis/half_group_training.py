"""Training signal of rewards: does training on half of each group change the other half by its rewards?

Half of the rollouts of each group are trained on again, with their own or other advantages. The change in
likelihood of the other half is then compared with values of these rollouts.

Values and changes are correlated within a group. With shuffled values, the correlation would be 0 on average,
with a variance of 1 / (n - 1) among n rollouts (Pitman 1937, the permutation distribution of r).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.analysis.diagnosis.statistics import centered
from buckeye.analysis.replay.retrain import masked_logprobs, trainer_from
from buckeye.runs.trained_step import TrainedStep
from buckeye.trainer.model.policy import PolicyNetwork
from buckeye.transport.batches import Batch
from buckeye.transport.checkpoint import list_checkpoints

Values = npt.NDArray[np.float64]

_MAX_STEPS = 12
_MAX_SECONDS = 20.0  # maximum trainer time of the batches in the run
_MIN_VARIANCE = 0.05  # minimum of p (1 - p), which is at most 0.25
_MIN_EXPLAINED = 0.98  # minimum explained share of the rewards' variance
_ZERO = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptBatch:
    """Kept batch with N samples of R rollouts.

    `rollout` i64[N] is the rollout of each sample, and `group` i64[R] the group of each rollout. `rewards` is
    f64[R], and `components` has the reward components by name, each f64[R].
    """

    batch: Batch
    rollout: npt.NDArray[np.int64]
    group: npt.NDArray[np.int64]
    rewards: Values
    components: Mapping[str, Values]

    @cached_property
    def advantages(self) -> Values:
        """Mean advantage over the sampled tokens of each rollout, f64[R]."""
        sampled = [sample.advantages[sample.loss_mask] for sample in self.batch.samples]
        totals = self.sums([float(values.sum()) for values in sampled])
        return totals / np.maximum(1, self.sums([len(values) for values in sampled]))

    def component(self, name: str) -> Values:
        """Return a reward component, f64[R]; 0 where it is missing."""
        return self.components.get(name, np.zeros(len(self.rewards)))

    def sums(self, values: Sequence[float]) -> Values:
        """Return the sum per rollout, f64[R], of one value per sample."""
        return np.bincount(self.rollout, values, minlength=len(self.group)).astype(float)

    @cached_property
    def members(self) -> Sequence[npt.NDArray[np.int64]]:
        """Rollouts of each group, i64[n] per group."""
        return [np.flatnonzero(self.group == group) for group in range(int(self.group.max()) + 1)]

    def center_by_group(self, values: Values) -> Values:
        """Return the values f64[R] minus their group means."""
        return centered(values, self.group)

    def without(self, name: str, weight: float) -> Values:
        """Return the rewards f64[R] minus one weighted component."""
        return self.rewards - weight * self.component(name)

    def with_advantages_from(self, values: Values) -> Batch:
        """Return the batch with advantages from `values` f64[R].

        The advantages are the values minus the mean of the group's trained rollouts, scaled to the RMS of the
        real advantages. They are 0 for held-out rollouts.
        """
        found, trained = np.zeros(len(values)), np.concatenate([members[::2] for members in self.members])
        found[trained] = centered(values[trained], self.group[trained])
        size, real = (math.sqrt(float(np.mean(each**2))) for each in (found, self.advantages))
        found *= real / size if size > _ZERO else 0.0
        samples = [
            replace(sample, advantages=np.where(sample.loss_mask, found[at], 0).astype(np.float32))
            for at, sample in zip(self.rollout, self.batch.samples, strict=True)
        ]
        return replace(self.batch, samples=tuple(samples))

    def sampled_mask(self, token: int) -> Values:
        """Return f64[R]: 1 where the policy has sampled the token, else 0."""
        found = [float(token in sample.token_ids[sample.loss_mask]) for sample in self.batch.samples]
        return (self.sums(found) > 0).astype(float)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement between rollout values and likelihood changes.

    `mean` is the mean correlation within `groups` groups, and `error` its standard error for shuffled values.
    """

    mean: float
    error: float
    groups: int

    def __str__(self) -> str:
        return f"{self.mean:+.2f}, with shuffled ones 0 ± {self.error:.2f}"


ValueFunction = Callable[[KeptBatch], Values]


def find_consecutive_batches(facts: DiagnosisFacts) -> list[KeptBatch]:
    """Return the longest run of consecutive kept batches that starts at step 0 or at a checkpoint.

    It ends after `_MAX_STEPS` batches, or when the trainer's time for them exceeds `_MAX_SECONDS`.
    """
    kept = {step for step in facts.run.kept_steps if step <= facts.until}
    starts = {0, *(one.step for one in list_checkpoints(facts.run.path / "checkpoints"))} & kept
    rows = [list(takewhile(kept.__contains__, range(start, start + _MAX_STEPS))) for start in sorted(starts)]
    found, seconds = list[KeptBatch](), 0.0
    for number in max(rows, key=len, default=[]):
        step = facts.run.trained(number)
        seconds += 0.0 if step is None else float(step.record["values"].get("seconds", 0.0))
        if step is None or not step.origins or seconds > _MAX_SECONDS:
            break
        found.append(_kept_batch(facts, step))
    return found


def _kept_batch(facts: DiagnosisFacts, step: TrainedStep) -> KeptBatch:
    places, samples, rows = zip(*facts.samples("reward, components", [step]), strict=True)
    rollouts, first, rollout = np.unique(places, axis=0, return_index=True, return_inverse=True)
    scores = [json.loads(rows[at][1] or "{}") for at in first]
    return KeptBatch(
        batch=replace(step.batch, samples=samples),
        rollout=rollout.reshape(-1),
        group=np.unique(rollouts[:, 1], return_inverse=True)[1],
        rewards=np.array([rows[at][0] for at in first], float),
        components={
            name: np.array([components.get(name, 0.0) for components in scores], float)
            for name in sorted(set[str]().union(*scores))
        },
    )


def train_on_half(facts: DiagnosisFacts, batches: Sequence[KeptBatch], values: ValueFunction) -> list[Values]:
    """Train on half of each batch with advantages from `values`, at the run's highest learning rate.

    Return, for each batch, the log-likelihood change of its rollouts in nats, f64[R]; not finite if the model
    breaks.
    """
    rate, found = float(facts.run.setting("trainer.optim.lr")), list[Values]()
    with trainer_from(facts.run.path, batches[0].batch.step, rate) as trainer:
        for batch in batches:
            before = _likelihoods(trainer.learner.policy, batch)
            trainer.train(batch.with_advantages_from(values(batch)))
            found.append(_likelihoods(trainer.learner.policy, batch) - before)
    return found


def _likelihoods(policy: PolicyNetwork, batch: KeptBatch) -> Values:
    """Return the summed log-probs of the sampled tokens of each rollout, f64[R]."""
    return batch.sums([float(values.sum()) for values in masked_logprobs(policy, batch.batch.samples)])


def agreement(batches: Sequence[KeptBatch], moved: Sequence[Values], values: ValueFunction) -> Agreement:
    """Return the agreement between values and the changes from `train_on_half`, over held-out rollouts."""
    found = list[tuple[float, float]]()
    for batch, change in zip(batches, moved, strict=True):
        rollout_values = values(batch)
        for members in batch.members:
            ours, changes = (each[members[1::2]] for each in (rollout_values, change))
            if len(ours) > 1 and np.isfinite(changes).all() and min(np.ptp(ours), np.ptp(changes)) > _ZERO:
                found.append((float(np.corrcoef(ours, changes)[0, 1]), 1 / (len(ours) - 1)))
    if not found:
        return Agreement(0.0, math.inf, 0)
    means, variances = zip(*found, strict=True)
    return Agreement(float(np.mean(means)), math.sqrt(sum(variances)) / len(found), len(found))


def common_token(batches: Sequence[KeptBatch]) -> int | None:
    """Return the token that splits most groups most evenly into rollouts with and without it.

    None if no token splits groups evenly enough.
    """
    uneven, rollouts = Counter[int](), 0
    for batch in batches:
        written = [set[int]() for _ in batch.group]
        for at, sample in zip(batch.rollout, batch.batch.samples, strict=True):
            written[at].update(sample.token_ids[sample.loss_mask].tolist())
        for members in batch.members:
            counts, size = Counter(token for at in members for token in written[at]), len(members)
            uneven.update({token: count * (size - count) / size for token, count in counts.items()})
        rollouts += len(written)
    token = max(uneven, key=lambda token: (uneven[token], -token), default=None)
    return token if token is not None and uneven[token] >= _MIN_VARIANCE * rollouts else None


def component_weights(batches: Sequence[KeptBatch]) -> dict[str, float]:
    """Return the weights of the components in the rewards, by least squares within groups.

    Empty if the rewards are not a weighted sum of components. A component that is not part of the reward has
    a weight of about 0.
    """
    names = sorted(set[str]().union(*(batch.components for batch in batches)))
    if not names:
        return {}
    rewards = np.concatenate([batch.center_by_group(batch.rewards) for batch in batches])
    columns = [
        np.concatenate([batch.center_by_group(batch.component(name)) for batch in batches]) for name in names
    ]
    table = np.stack(columns, axis=1)
    weights, *_ = np.linalg.lstsq(table, rewards, rcond=None)
    if float(np.var(rewards - table @ weights)) > (1 - _MIN_EXPLAINED) * float(np.var(rewards)):
        return {}
    return {name: float(weight) for name, weight in zip(names, weights, strict=True)}
