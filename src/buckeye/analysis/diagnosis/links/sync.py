"""Checks of the weight sync: the trained weights arrive, unchanged, in all engines."""

from __future__ import annotations

from typing import Any

import numpy as np

from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.analysis.diagnosis.statistics import rms, share_interval, slope_interval
from buckeye.monitor.finding import Finding

_ENOUGH = 40
"""Minimum number of tokens for a finding."""


def weights_do_not_arrive(facts: DiagnosisFacts) -> Finding | str | None:
    """Find engines without the new weights, from tokens that recur after equal text.

    The trainer's log-probs of these tokens moved. The sampler's did not, not as much, or not on all engines.
    """
    change = facts.tokens.changes
    first = facts.tokens.initial_logprob_gap()
    if len(first) >= _ENOUGH and rms(first) > 3 * facts.rounding_tolerance:
        return None  # they already disagree on the initial weights
    clear = np.abs(change.trainer) > max(10 * facts.measured_tolerance, 0.01)
    if clear.sum() < 10:
        return None
    sampler, trainer, sample = change.sampler[clear], change.trainer[clear], change.sample[clear]
    apart = np.abs(sampler - trainer)
    stale = np.abs(sampler) <= np.maximum(facts.measured_tolerance, 0.02 * np.abs(trainer))
    exact = apart <= np.maximum(facts.measured_tolerance, 0.02 * np.abs(trainer))
    measured = f"{exact.mean():.0%} of {len(exact)} recurring tokens moved as in the trainer"
    if bool(exact.all()):
        return measured
    stale_low, _ = share_interval(int(stale.sum()), len(stale), 2.0)
    exact_low, exact_high = share_interval(int(exact.sum()), len(exact), 2.0)
    low, high = slope_interval(trainer, sampler)
    fact = (
        f"{len(stale)} tokens that were sampled after the same text at two versions: the trainer's "
        "log-prob moved "
        f"by {rms(trainer):.3f} nats, the sampler's by {rms(sampler):.3f}; {stale.mean():.0%} did not "
        "move at all"
    )
    evidence = [(fact, facts.metrics("mismatch_kl_fresh", "weights/served_kl"))]
    figures: dict[str, Any] = {
        "slope": (low + high) / 2,
        "unmoved": float(stale.mean()),
        "right": float(exact.mean()),
    }
    if stale_low > 0.6:
        return facts.finding(
            "stale_weights",
            "The weights that are trained moved, and the sampler's log-probs of the same tokens did not",
            "new weights do not reach the engines, which keep the old ones",
            "check the weight updates in `rl logs --events`, and /update_weights of the engine",
            evidence=[*evidence, ("the versions that the engines report", facts.metrics("policy_version"))],
            confidence="sure",
            **figures,
        )
    if exact_low > 0.05 and exact_high < 0.98 and _by_sample(sample, exact) > 0.8:
        count = round(1 / max(float(exact.mean()), 1e-9))
        return facts.finding(
            "one_engine_stale",
            f"{exact.mean():.0%} of the rollouts were sampled with the recorded weights; the others were not",
            "some engines do not get new weights" + (f" (about one of {count} does)" if count > 1 else ""),
            "compare inference/<i>/weight_version of the engines, and restart the outdated one",
            evidence=[*evidence, ("the versions by engine", facts.metrics("inference/0/weight_version"))],
            **figures,
        )
    lora = facts.run.setting("trainer.model.experimental.lora") is not None
    if high < 0.9 or low > 1.1 or (lora and exact_high < 0.5):
        return facts.finding(
            "adapter_scale" if lora else "weights_arrive_changed",
            "A weight update changes the sampler's log-probs by "
            f"{rms(sampler) / rms(trainer):.2f} times as much as the trainer's",
            "the engine applies the adapter with another scale (alpha / rank), or to other modules"
            if lora
            else "the engines have other weights than the trainer",
            "compare alpha and rank in adapter_config.json with trainer.model.experimental.lora"
            if lora
            else "compare weights/step_N with the checkpoint of the same step",
            evidence=evidence,
            **figures,
        )
    return measured


def _by_sample(sample: np.ndarray, exact: np.ndarray) -> float:
    """Return the share of samples whose tokens are all exact, or all not."""
    _, places = np.unique(sample, return_inverse=True)
    counts, hits = np.bincount(places), np.bincount(places, exact)
    return float(((hits == 0) | (hits == counts)).mean())


def mismatch_grows(facts: DiagnosisFacts) -> Finding | str | None:
    """Find fresh tokens that agree at first and disagree later."""
    tokens = facts.tokens
    first, later = tokens.initial_logprob_gap(), tokens.logprob_gap[tokens.fresh & (tokens.version > 0)]
    if min(len(first), len(later)) < _ENOUGH or rms(first) > 3 * facts.rounding_tolerance:
        return None
    if rms(later) <= max(20 * rms(first), 3 * facts.rounding_tolerance):
        return (
            f"sampler and trainer {rms(later):.2g} nats apart on later weights, {rms(first):.2g} on the first"
        )
    return facts.finding(
        "mismatch_after_updates",
        f"Sampler and trainer agreed on the first weights ({rms(first):.2g} nats) and do not later "
        f"({rms(later):.2g})",
        "the engines have other weights than the trainer",
        "check the weight updates in `rl logs --events`; restart the engines",
        evidence=[("mismatch by step", facts.metrics("mismatch_kl_fresh"))],
        difference=rms(later),
    )


CHECKS = (weights_do_not_arrive, mismatch_grows)
