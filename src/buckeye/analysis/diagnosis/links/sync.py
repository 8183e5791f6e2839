"""Checks of the weight sync: the trained weights arrive, unchanged, in all engines."""

from __future__ import annotations

import numpy as np

from buckeye.analysis.diagnosis.facts import DiagnosisFacts, Result
from buckeye.analysis.diagnosis.statistics import rms, share_interval, slope_interval

_ENOUGH = 40
"""Minimum number of tokens for a finding."""


def weights_do_not_arrive(facts: DiagnosisFacts) -> Result:
    """Find engines without the new weights, from tokens that were sampled again after the same text.

    The trainer's log-probs of these tokens changed. The sampler's changed less, or only on some engines.
    """
    sampler, trainer, sample = facts.tokens.changes
    first = facts.tokens.initial_logprob_gap()
    if len(first) >= _ENOUGH and rms(first) > 3 * facts.rounding_tolerance:
        return None  # they already disagree on the initial weights
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
    """Find fresh tokens that agree at first and disagree later."""
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


CHECKS = (weights_do_not_arrive, mismatch_grows, stale_evaluations)
