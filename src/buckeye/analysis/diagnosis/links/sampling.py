"""Checks of sampling: variation within groups, and the distribution that the trainer computes."""

from __future__ import annotations

import math

import numpy as np

from buckeye.analysis.diagnosis.facts import RECENT, TRAINED, DiagnosisFacts
from buckeye.analysis.diagnosis.links.model import LOW_TEMPERATURE
from buckeye.analysis.diagnosis.statistics import is_below, mean_interval, rms, share_interval, slope_interval
from buckeye.monitor.finding import Finding
from buckeye.monitor.learning_findings import RANDOM_LOGPROB
from buckeye.monitor.verdicts import NEARLY_ALL

_ENOUGH = 40
"""Minimum number of tokens for a finding."""
_ENOUGH_OF_FAR = 12
_MIN_REPLIES = 10
_HIGH_TEMPERATURE = 1.5
_MOST_ALIKE = 0.5


def equal_seeds(facts: DiagnosisFacts) -> Finding | str | None:
    """Find groups with identical rollouts that are too unlikely under the policy."""
    alike = surprising = groups = 0
    nats = 0.0
    step = 0
    for batch in facts.batches:
        ids = batch.column("token_ids")
        logprobs = np.where(batch.column("loss_mask"), batch.column("logprobs"), 0)
        members: dict[int, list[int]] = {}
        for number, origin in enumerate(batch.origins):
            members.setdefault(origin[0], []).append(number)
        for found in members.values():
            if len(found) < 2:
                continue
            groups += 1
            pieces = [slice(int(batch.starts[n]), int(batch.starts[n + 1])) for n in found]
            if all(np.array_equal(ids[piece], ids[pieces[0]]) for piece in pieces[1:]):
                alike += 1
                chance = (len(found) - 1) * float(logprobs[pieces[0]].sum())
                nats -= chance
                surprising += chance < -math.log(100)
                step = batch.batch.step
    if not groups:
        return None
    if share_interval(alike, groups, 2.0)[0] < 0.5 or nats < 30 or surprising < alike / 4:
        return f"{alike} of {groups} groups identical"
    return facts.finding(
        "equal_seeds",
        f"In {alike} of {groups} groups all rollouts are identical, though the policy is not "
        f"deterministic: the chance of that is e^-{nats:.0f}",
        "the rollouts of a group are sampled with the same seed, so there is nothing to compare",
        "remove orchestrator.sampling.seed, or check how the engine uses seeds",
        evidence=[(f"the groups of step {step}", facts.rollouts(step))],
        confidence="sure",
        share=alike / groups,
    )


def temperature_too_low(facts: DiagnosisFacts) -> Finding | str | None:
    """Find groups whose rollouts are identical from the start, at a low temperature."""
    alike = facts.early_mean("orchestrator/batch/alike")
    temperature = facts.run.setting("orchestrator.sampling.temperature")
    if alike is None:
        return None
    measured = f"at first {alike:.0%} of the groups had identical rollouts"
    if temperature is None or temperature > LOW_TEMPERATURE or alike < _MOST_ALIKE:
        return f"{measured} (at most {_MOST_ALIKE:.0%})"
    return facts.finding(
        "temperature_too_low",
        measured,
        f"the temperature is so low that the replies to a task are equal (orchestrator.sampling.temperature "
        f"= {temperature:g}), so there is nothing to compare",
        "use a temperature near 1",
        evidence=[("the share of identical groups by step", facts.metrics("batch/alike"))],
        until=facts.early,
        share=alike,
    )


def temperature_too_high(facts: DiagnosisFacts) -> Finding | None:
    """Find first replies of random tokens at a high temperature."""
    logprob = facts.early_mean("orchestrator/logprob/mean")
    temperature = facts.run.setting("orchestrator.sampling.temperature") or 0.0
    if logprob is None or logprob > RANDOM_LOGPROB or temperature < _HIGH_TEMPERATURE or facts.has_risen:
        return None
    return facts.finding(
        "temperature_too_high",
        f"The first replies have {logprob:.2f} nats a token: they are random tokens",
        f"the temperature is too high (orchestrator.sampling.temperature = {temperature:g})",
        "use a temperature near 1",
        evidence=[("the first replies", facts.rollouts(facts.batch_steps[0].number))],
        until=facts.early,
        logprob=logprob,
    )


def truncated_replies(facts: DiagnosisFacts) -> Finding | str | None:
    """Find many truncated replies with lower rewards than complete ones, from the start on.

    Replies that grow longer only later are a consequence of the updates.
    """
    rows = facts.query(f"SELECT reward, truncated, completion_tokens, step FROM rollouts WHERE {TRAINED}")  # noqa: S608
    cut, ended = ([row for row in rows if row[1] == kind and row[3] > facts.last - RECENT] for kind in (1, 0))
    first = [row for row in rows if row[3] <= facts.early]
    cut_first = [row for row in first if row[1]]
    if len(cut) + len(ended) < 30:
        return None
    share = len(cut) / (len(cut) + len(ended))
    measured = f"{share:.0%} of the replies cut off, {len(cut_first) / max(1, len(first)):.0%} at first"
    if min(share, len(cut_first) / max(1, len(first))) >= NEARLY_ALL:
        return facts.finding(
            "truncated",
            measured,
            "nearly every reply is cut off, from the start on",
            "raise orchestrator.sampling.max_tokens, unless one token is the whole answer",
            evidence=[("the replies", facts.rollouts(facts.last))],
            confidence="possible",
        )
    if min(share, len(cut_first) / max(1, len(first))) < 0.2 or min(len(cut), len(ended)) < _MIN_REPLIES:
        return f"{measured} (at most 20 %)"
    if facts.has_risen or not is_below([row[0] for row in cut], [row[0] for row in ended]):
        return f"{measured} (they have no lower rewards, or the reward rises)"
    length = float(np.mean([row[2] for row in cut]))
    return facts.finding(
        "truncated_replies",
        f"{share:.0%} of the replies are cut off after {length:.0f} tokens, and have lower rewards than "
        "complete replies",
        "max_tokens is too small for these tasks, so correct answers are cut off",
        "raise orchestrator.sampling.max_tokens, or shape the reward by length",
        evidence=[(f"mean reward {_range([r[0] for r in cut])}, of complete replies "
        f"{_range([r[0] for r in ended])}",
                   facts.rollouts(facts.last))],
        share=share,
    )  # fmt: skip


def _range(rewards: list[float]) -> str:
    low, high = mean_interval(rewards, 2.0)
    return f"{low:.2f} to {high:.2f}"


def rounded_logprobs(facts: DiagnosisFacts) -> Finding | None:
    """Find log-probs with the precision of bfloat16; certain tokens are excluded."""
    tokens = facts.tokens
    for name, values in (("sampler", tokens.sampler), ("trainer", tokens.trainer)):
        found = values[np.isfinite(values) & (values < -1e-3) & (tokens.version >= 0)].astype(np.float32)
        if len(found) < _ENOUGH:
            continue
        coarse = (found.view(np.uint32) & 0xFFFF) == 0
        if share_interval(int(coarse.sum()), len(found))[0] <= 0.8:
            continue
        apart = rms(tokens.logprob_gap[tokens.fresh])
        return facts.finding(
            "rounded_log_probs",
            f"{coarse.mean():.0%} of the {name}'s log-probs have only the 8 bits of bfloat16",
            f"the {name} takes the log-softmax in bfloat16, so ratios are wrong by up to a percent a token",
            "compute the log-softmax in float32",
            evidence=[
                (
                    f"sampler and trainer are {apart:.2g} nats apart (root mean square) on the same weights",
                    facts.metrics("mismatch_kl_fresh"),
                )
            ],
            confidence="sure",
            share=float(coarse.mean()),
            difference=apart,
        )
    return None


def mismatch_from_the_start(facts: DiagnosisFacts) -> Finding | str | None:
    """Find a mismatch between sampler and trainer on the initial weights.

    Nothing is measured if the loss mask is misplaced, because the tokens are not comparable then.
    """
    tokens = facts.tokens
    first = tokens.fresh & (tokens.version == 0)
    sampler, trainer = tokens.sampler[first], tokens.trainer[first]
    apart, limit = rms(sampler - trainer), 3 * facts.rounding_tolerance
    enough = _ENOUGH if apart <= 10 * limit else _ENOUGH_OF_FAR
    if first.sum() < enough or facts.is_mask_misplaced:
        return None
    if apart <= limit:
        return f"sampler and trainer {apart:.2g} nats apart on the first weights (at most {limit:g})"
    beside = tokens.centered_logprobs(first)
    low, high = slope_interval(beside[1], beside[0])
    slope = (low + high) / 2
    left = rms(beside[0] - slope * beside[1]) / max(rms(beside[0]), 1e-9)
    evidence = [
        (
            f"{int(first.sum())} tokens of the first weights: {apart:.3f} nats apart (root mean square), "
            f"where rounding makes {facts.rounding_tolerance:g}",
            facts.metrics("mismatch_kl_fresh"),
        ),
        (
            "differences of log-probs after the same text: the sampler's are "
            f"{low:.2f} to {high:.2f} times the trainer's",
            facts.command("replay", "--step", 0),
        ),
    ]
    if left < 0.1 and slope > 0.0 and (high < 0.97 or low > 1.03):
        return facts.finding(
            "temperature_mismatch",
            f"On the first weights the sampler's distribution is {'flatter' if slope < 1 else 'sharper'} "
            f"than the trainer's, everywhere by the same factor ({slope:.2f})",
            f"the engine samples with {1 / slope:.2f} times the temperature that the trainer computes with",
            "check orchestrator.sampling.temperature, and the sampling settings of engine and environment",
            evidence=evidence,
            difference=apart,
            slope=slope,
        )
    return facts.finding(
        "mismatch_from_the_start",
        f"Sampler and trainer differ by {apart:.3f} nats a token on the initial weights",
        "engine and trainer do not compute the same distribution: the weights, the dtype, or a setting of "
        "sampling (penalties, top_p) differ",
        "compare them on one text (--try), and the engine's settings with the trainer's",
        evidence=evidence,
        difference=apart,
    )


CHECKS = (
    equal_seeds,
    temperature_too_low,
    temperature_too_high,
    truncated_replies,
    rounded_logprobs,
    mismatch_from_the_start,
)
