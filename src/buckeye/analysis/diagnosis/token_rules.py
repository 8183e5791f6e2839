"""Rules on the trained tokens: the loss mask, log-probs, and the weights that sampled them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.analysis.diagnosis.statistics import rms, share_interval, slope_interval
from buckeye.monitor.finding import Finding

_ENOUGH = 40
"""Minimum number of tokens for a finding."""


def unsampled_tokens(facts: DiagnosisFacts) -> Finding | None:
    """Find tokens in the loss mask that no policy has sampled."""
    tokens = facts.tokens
    if len(tokens) < _ENOUGH:
        return None
    unsampled = tokens.version < 0
    share = float(unsampled.mean())
    if share_interval(int(unsampled.sum()), len(tokens))[0] < 0.01:
        return None
    step = int(tokens.step[unsampled][0])
    return facts.finding(
        "mask_misplaced",
        f"{share:.0%} of the tokens in the loss mask were never sampled",
        "the loss mask is misplaced (shifted?): tokens of the environment are trained, and tokens of the "
        "policy are not",
        "check how the batch is built (orchestrator/batch.py), and the return value of a custom environment",
        evidence=[
            (f"step {step}: {int(unsampled.sum())} such tokens", facts.command("replay", "--step", step))
        ],
        confidence="sure",
        share=share,
    )


def shifted_logprobs(facts: DiagnosisFacts) -> Finding | None:
    """Find trainer log-probs that belong to the adjacent token."""
    tokens, fresh = facts.tokens, facts.tokens.fresh
    if fresh.sum() < _ENOUGH:
        return None
    here = rms(tokens.logprob_gap[fresh])
    beside = fresh[1:] & fresh[:-1] & (tokens.sample[1:] == tokens.sample[:-1])
    shifts = {
        1: rms((tokens.sampler[:-1] - tokens.trainer[1:])[beside]),
        -1: rms((tokens.sampler[1:] - tokens.trainer[:-1])[beside]),
    }
    place, least = min(shifts.items(), key=lambda item: item[1])
    if not (here > 10 * facts.rounding_tolerance and least < here / 10):
        return None
    return facts.finding(
        "mask_misplaced",
        "The trainer's log-probs are those that the sampler has one token "
        f"{'before' if place > 0 else 'after'}",
        "log-probs are shifted by one token",
        "check the shift between tokens and labels",
        evidence=[
            (
                f"they differ by {here:.3f} nats (root mean square); shifted by one token, they differ by "
                f"{least:.3g}",
                facts.command("replay", "--step", int(tokens.step[fresh][0])),
            )
        ],
        confidence="sure",
        difference=here,
        shifted=least,
    )


def rounded_logprobs(facts: DiagnosisFacts) -> Finding | None:
    """Find log-probs with the precision of bfloat16; certain tokens are excluded."""
    tokens = facts.tokens
    for name, values in (("sampler", tokens.sampler), ("trainer", tokens.trainer)):
        found = values[np.isfinite(values) & (values < -1e-3) & (tokens.version >= 0)].astype(np.float32)
        if len(found) < _ENOUGH:
            continue
        coarse = (found.view(np.uint32) & 0xFFFF) == 0
        if share_interval(int(coarse.sum()), len(found))[0] > 0.8:
            apart = rms(tokens.logprob_gap[tokens.fresh])
            return facts.finding(
                "rounded_log_probs",
                f"{coarse.mean():.0%} of the {name}'s log-probs have only the 8 bits of bfloat16",
                f"the {name} takes the log-softmax in bfloat16, so ratios are wrong by up to a percent a "
                "token",
                "compute the log-softmax in float32",
                evidence=[
                    (
                        f"sampler and trainer are {apart:.2g} nats apart (root mean square) on the same "
                        "weights",
                        facts.metrics("mismatch_kl_fresh"),
                    )
                ],
                confidence="sure",
                share=float(coarse.mean()),
                difference=apart,
            )
    return None


def mismatch_from_the_start(facts: DiagnosisFacts) -> Finding | None:
    """Find a mismatch between sampler and trainer on the initial weights."""
    tokens = facts.tokens
    first = tokens.fresh & (tokens.version == 0)
    sampler, trainer = tokens.sampler[first], tokens.trainer[first]
    apart = rms(sampler - trainer)
    if first.sum() < _ENOUGH or apart <= 3 * facts.rounding_tolerance:
        return None
    beside = tokens.centered_logprobs(first)
    low, high = slope_interval(beside[1], beside[0])
    slope = (low + high) / 2
    left = rms(beside[0] - slope * beside[1]) / max(rms(beside[0]), 1e-9)
    evidence = [
        (
            f"{int(first.sum())} tokens of the first weights: {apart:.3f} nats apart (root mean square), "
            "where "
            f"rounding makes {facts.rounding_tolerance:g}",
            facts.metrics("mismatch_kl_fresh"),
        ),
        (
            "differences of log-probs after the same text: the sampler's are "
            f"{low:.2f} to {high:.2f} times the trainer's",
            facts.command("replay", "--step", 0),
        ),
    ]
    if left < 0.1 and (high < 0.97 or low > 1.03):
        return facts.finding(
            "temperature_mismatch",
            f"On the first weights the sampler's distribution is {'flatter' if slope < 1 else 'sharper'} "
            "than "
            f"the trainer's, everywhere by the same factor ({slope:.2f})",
            f"the engine samples with {1 / slope:.2f} times the temperature that the trainer computes with",
            "check orchestrator.sampling.temperature, and the sampling settings of engine and environment",
            evidence=evidence,
            difference=apart,
            slope=slope,
        )
    return facts.finding(
        "mismatch_from_the_start",
        f"Sampler and trainer differ by {apart:.3f} nats a token on the initial weights",
        "engine and trainer do not compute the same model: the weights, the dtype or the computation differ",
        "compare them on one text (--try), and the engine's settings with the trainer's",
        evidence=evidence,
        difference=apart,
    )


def weights_do_not_arrive(facts: DiagnosisFacts) -> Finding | None:
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
    if bool(exact.all()):
        return None
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
    return None


def _by_sample(sample: np.ndarray, exact: np.ndarray) -> float:
    """Return the share of samples whose tokens are all exact, or all not."""
    _, places = np.unique(sample, return_inverse=True)
    counts, hits = np.bincount(places), np.bincount(places, exact)
    return float(((hits == 0) | (hits == counts)).mean())


def mismatch_grows(facts: DiagnosisFacts) -> Finding | None:
    """Find fresh tokens that agree at first and disagree later."""
    tokens = facts.tokens
    first, later = tokens.initial_logprob_gap(), tokens.logprob_gap[tokens.fresh & (tokens.version > 0)]
    if min(len(first), len(later)) < _ENOUGH or rms(first) > 3 * facts.rounding_tolerance:
        return None
    if rms(later) <= max(20 * rms(first), 3 * facts.rounding_tolerance):
        return None
    return facts.finding(
        "mismatch_after_updates",
        f"Sampler and trainer agreed on the first weights ({rms(first):.2g} nats) and do not later "
        f"({rms(later):.2g})",
        "the engines have other weights than the trainer",
        "check the weight updates in `rl logs --events`; restart the engines",
        evidence=[("mismatch by step", facts.metrics("mismatch_kl_fresh"))],
        difference=rms(later),
    )


def ends_not_trained(facts: DiagnosisFacts) -> Finding | None:
    """Find end tokens of replies that are missing in the loss mask."""
    ended = missing = 0
    example = None
    known = {
        (step, group, number): (tokens, turns)
        for step, group, number, tokens, turns in facts.query(
            "SELECT step, grp, number, completion_tokens, turns FROM rollouts WHERE split = 'train' AND "
            "retried = 0 "
            "AND dropped IS NULL AND truncated = 0 AND cut = 0 AND reward IS NOT NULL AND step <= {until}"
        )
    }
    for batch in facts.batches:
        masks = np.add.reduceat(batch.column("loss_mask").astype(int), batch.starts[:-1])
        trained: dict[tuple[int, int], int] = {}
        for (group, number, _, _), count in zip(batch.origins, masks, strict=False):
            trained[group, number] = trained.get((group, number), 0) + int(count)
        for (group, number), count in trained.items():
            sampled = known.get((batch.batch.step, group, number))
            if sampled is None or not count:
                continue
            ended += 1
            if sampled[0] - count == sampled[1]:
                missing += 1
                example = example or (batch.batch.step, group, number)
    if ended < 10 or share_interval(missing, ended)[0] < 0.7 or example is None:
        return None
    step, group, number = example
    return facts.finding(
        "end_not_trained",
        f"In {missing} of {ended} complete replies, exactly one token per turn is not trained",
        "the token that ends a reply is masked, so the policy never learns to end",
        "let the loss mask cover the end token",
        evidence=[
            (
                f"step {step}: the mask has one token fewer than were sampled",
                facts.rollouts(step, "--group", group, "--rollout", number),
            )
        ],
        confidence="sure",
        share=missing / ended,
    )


def equal_seeds(facts: DiagnosisFacts) -> Finding | None:
    """Find groups with identical rollouts that are too unlikely under the policy."""
    alike = surprising = groups = 0
    nats = 0.0
    step = 0
    for batch in facts.batches:
        if not batch.origins:
            continue
        ids, logprobs = (
            batch.column("token_ids"),
            np.where(batch.column("loss_mask"), batch.column("logprobs"), 0),
        )
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
    if not alike or share_interval(alike, groups, 2.0)[0] < 0.5 or nats < 30 or surprising < alike / 4:
        return None
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
