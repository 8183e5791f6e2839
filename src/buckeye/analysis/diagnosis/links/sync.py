"""Checks of the weight sync: the trained weights arrive, unchanged, in all engines."""

from __future__ import annotations

import numpy as np

from buckeye.analysis.diagnosis.facts import DiagnosisFacts, Result
from buckeye.analysis.diagnosis.statistics import rms, share_interval, slope_interval

_ENOUGH = 40
"""Minimum number of tokens for a finding."""
_RECENT = 3
_MIN_CHANGES = 3
_MOST_PER_UPDATE = 4.0
_MOST_AGE = 3  # steps


def weights_do_not_arrive(facts: DiagnosisFacts) -> Result:
    """Find engines without the new weights: the trainer's log-probs changed, and the sampler's did not.

    Compared are log-probs of the same token after the same text, sampled at an early and at a late step. If
    only some engines are stale, the sampler's log-probs changed in some samples only.
    """
    sampler, trainer, sample = facts.tokens.changes
    first = facts.tokens.initial_logprob_gap()
    if len(first) >= _ENOUGH and rms(first) > 3 * facts.rounding_tolerance:
        return None  # they already disagree on the initial weights
    if facts.is_sampler_stale:
        moved = rms(facts.tokens.changes_at_any_age[1])
        seen = (
            f"after the same text, the trainer's log-probs moved by {moved:.3f} nats, the sampler's did not"
        )
        return facts.finding("stale_weights", seen, confidence="sure")
    clear = np.abs(trainer) > max(10 * facts.measured_tolerance, 0.01)
    if clear.sum() < 10:
        return None
    sampler, trainer, sample = sampler[clear], trainer[clear], sample[clear]
    tolerance = np.maximum(facts.measured_tolerance, 0.02 * np.abs(trainer))
    stale, exact = np.abs(sampler) <= tolerance, np.abs(sampler - trainer) <= tolerance
    measured = f"{exact.mean():.0%} of {len(exact)} recurring tokens moved as in the trainer"
    exact_low, exact_high = share_interval(int(exact.sum()), len(exact), 2.0)
    low, high = slope_interval(trainer, sampler)
    seen = (
        f"{measured}: after the same text, the trainer's log-probs of these tokens moved by "
        f"{rms(trainer):.3f} nats, the sampler's by {rms(sampler):.3f}; {stale.mean():.0%} of the sampler's "
        "did not move"
    )
    if share_interval(int(stale.sum()), len(stale), 2.0)[0] > 0.6:
        return facts.finding("stale_weights", seen, confidence="sure")
    if exact_low > 0.05 and exact_high < 0.98 and _by_sample(sample, exact) > 0.8:
        return facts.finding("one_engine_stale", seen)
    lora = facts.run.setting("trainer.model.experimental.lora") is not None
    if not exact.all() and (high < 0.9 or low > 1.1 or (lora and exact_high < 0.5)):
        return facts.finding("adapter_scale" if lora else "weights_arrive_changed", seen)
    return measured


def _by_sample(sample: np.ndarray, exact: np.ndarray) -> float:
    """Return the share of samples whose tokens are all exact, or all not."""
    _, places = np.unique(sample, return_inverse=True)
    counts, hits = np.bincount(places), np.bincount(places, exact)
    return float(((hits == 0) | (hits == counts)).mean())


def mismatch_grows(facts: DiagnosisFacts) -> Result:
    """Find log-probs of sampler and trainer that agree on the initial weights and differ on later ones.

    Only tokens that were sampled from the weights of their step are compared.
    """
    tokens = facts.tokens
    first, later = tokens.initial_logprob_gap(), tokens.logprob_gap[tokens.fresh & (tokens.version > 0)]
    if min(len(first), len(later)) < _ENOUGH or rms(first) > 3 * facts.rounding_tolerance:
        return None
    measured = (
        f"sampler and trainer {rms(later):.2g} nats apart on later weights, {rms(first):.2g} on the first"
    )
    if rms(later) <= max(20 * rms(first), 3 * facts.rounding_tolerance):
        return measured
    return facts.finding("mismatch_after_updates", measured)


def aged_tokens(facts: DiagnosisFacts) -> Result:
    """Find tokens of older weights that differ more between sampler and trainer than updates explain.

    `trainer/update/logprob_change` is the change that an update makes. It is measured at some steps only, so
    tokens of the step after the last of them must differ by more than that update too.
    """
    tokens, by_step = facts.tokens, facts.values("trainer/update/logprob_change")
    changes = by_step.values()
    aged = (tokens.version >= 0) & (tokens.version < tokens.step) & np.isfinite(tokens.trainer)
    per_update = np.abs(tokens.logprob_gap) / np.maximum(1, tokens.step - tokens.version)
    steps = [step for step in np.unique(tokens.step) if (aged & (tokens.step == step)).sum() >= _ENOUGH]
    gaps = [float(per_update[aged & (tokens.step == step)].mean()) for step in steps[-_RECENT:]]
    if len(changes) < _MIN_CHANGES or len(gaps) < _RECENT:
        return None
    measured = (
        f"sampler and trainer {np.median(gaps):.2g} nats per update apart, an update changes up to "
        f"{max(changes):.2g}"
    )
    explained = [
        float(np.abs(tokens.logprob_gap[chosen]).mean())
        <= _MOST_PER_UPDATE * change + facts.rounding_tolerance
        for step, change in by_step.items()
        if (chosen := aged & (tokens.version == step) & (tokens.step == step + 1)).sum() >= _ENOUGH
    ]
    if np.median(gaps) <= _MOST_PER_UPDATE * max(changes) + facts.rounding_tolerance or any(explained[-1:]):
        return measured
    return facts.finding("mismatch_after_updates", measured)


def evaluated_old_weights(facts: DiagnosisFacts) -> Result:
    """Find evaluations of weights that are much older than their step."""
    rows = facts.query(
        "SELECT step, min(oldest_version) FROM rollouts WHERE {evaluated} AND oldest_version IS NOT NULL "
        "GROUP BY step ORDER BY step"
    )
    old = [step for step, version in rows if version < min(step, facts.last + 1) - _MOST_AGE]
    if len(rows) < 2:
        return None
    measured = f"{len(old)} of {len(rows)} evaluations are of weights more than {_MOST_AGE} steps old"
    return measured if not old else facts.finding("stale_evaluations", measured, old[0])


def stale_evaluations(facts: DiagnosisFacts) -> Result:
    """Find evaluations that all have the same rewards, though the training reward has risen."""
    evaluations = facts.evaluations
    if len(evaluations) < 3 or len(evaluations[0]) < 10 or not facts.has_risen:
        return None
    equal = sum(rewards == evaluations[0] for rewards in evaluations[1:])
    measured = f"{equal} of {len(evaluations) - 1} evaluations have exactly the rewards of the first"
    if equal < len(evaluations) - 1 or max(evaluations[0]) - min(evaluations[0]) < 1e-6:
        return measured
    return facts.finding("stale_evaluations", measured)


CHECKS = (weights_do_not_arrive, mismatch_grows, aged_tokens, evaluated_old_weights, stale_evaluations)
