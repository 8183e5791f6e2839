"""Checks of advantages and loss: sign, placement, mask, bounds, KL term."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from buckeye.analysis.diagnosis.facts import TRAINED, DiagnosisFacts
from buckeye.analysis.diagnosis.statistics import mean_interval, rms, share_interval, slope_interval
from buckeye.monitor.finding import Finding

_ENOUGH = 40
"""Minimum number of tokens for a finding."""
_MIN_SAMPLES = 20
LORA_ALPHA = "trainer.model.experimental.lora.alpha"


def unsampled_tokens(facts: DiagnosisFacts) -> Finding | str | None:
    """Find tokens in the loss mask that no policy has sampled."""
    tokens = facts.tokens
    if len(tokens) < _ENOUGH:
        return None
    unsampled = tokens.unsampled
    share = float(unsampled.mean())
    if share_interval(int(unsampled.sum()), len(tokens))[0] < 0.01:
        return f"{share:.1%} of the trained tokens were never sampled (at most 1 %)"
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
    shifted = facts.tokens.shifted_by(facts.rounding_tolerance)
    if shifted is None:
        return None
    place, here, least = shifted
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
                facts.command("replay", "--step", int(facts.tokens.step[facts.tokens.fresh][0])),
            )
        ],
        confidence="sure",
        difference=here,
        shifted=least,
    )


def advantages_against_rewards(facts: DiagnosisFacts) -> Finding | str | None:
    """Find groups in which the rollout with the higher reward has the lower advantage, or the same."""
    # CROSS and the plus make SQLite look up each rollout's group instead of joining all pairs of rollouts
    rows = facts.query(
        "SELECT a.step, a.grp, a.shaped_reward - b.shaped_reward, a.advantage - b.advantage FROM rollouts a "
        "CROSS JOIN rollouts b ON b.split = a.split AND b.step = +a.step AND b.grp = a.grp AND b.at > a.at "
        "AND b.path = a.path WHERE a.split = 'train' AND a.dropped IS NULL AND b.dropped IS NULL "
        "AND a.retried = 0 AND b.retried = 0 AND a.turns = 1 "
        "AND b.turns = 1 AND a.step <= {until} AND a.step > ? AND abs(a.shaped_reward - b.shaped_reward) "
        "> 1e-6 "
        "AND a.advantage IS NOT NULL AND b.advantage IS NOT NULL LIMIT 100000",
        facts.last - 30,
    )
    wrong = [(step, group) for step, group, reward, advantage in rows if reward * advantage < -1e-12]
    equal = [(step, group) for step, group, _, advantage in rows if abs(advantage) < 1e-12]
    if len(rows) < _MIN_SAMPLES:
        return None
    if share_interval(len(equal), len(rows))[0] > 0.5:
        step, group = equal[-1]
        return facts.finding(
            "advantages_lost",
            f"In {len(equal)} of {len(rows)} pairs of rollouts, different rewards have the same advantage",
            "the advantages do not depend on the rewards, so nothing is learned from them",
            _CHECK_ADVANTAGE,
            evidence=[_rewards_of(facts, step, group)],
            share=len(equal) / len(rows),
        )
    low, share = share_interval(len(wrong), len(rows))[0], len(wrong) / len(rows)
    measured = (
        f"in {share:.0%} of {len(rows)} pairs of rollouts, the one with the higher reward has the lower"
    )
    if low < 0.02:
        return f"{measured} advantage"
    turned, (step, group) = low > 0.7, wrong[-1]
    return facts.finding(
        "advantage_sign" if turned else "advantages_misplaced",
        f"{measured[0].upper()}{measured[1:]} advantage",
        "the advantages have the wrong sign, so training makes the worst rollouts more likely"
        if turned
        else "advantages belong to other rollouts of the batch (wrong order)",
        _CHECK_ADVANTAGE,
        evidence=[_rewards_of(facts, step, group)],
        confidence="sure" if facts.run.setting("orchestrator.advantage.type") != "custom" else "likely",
        share=share,
    )


def _rewards_of(facts: DiagnosisFacts, step: int, group: int) -> tuple[str, str]:
    """Return the evidence that shows rewards and advantages of a group."""
    return f"rewards and `advantages` of group {group}", facts.rollouts(step, "--group", group, "--json")


_CHECK_ADVANTAGE = "check orchestrator.advantage, and your own advantage function"


def misplaced_advantages(facts: DiagnosisFacts) -> Finding | str | None:
    """Find samples whose advantage differs from the advantage of their rollout."""
    wrong = looked = 0
    example = None
    for batch in facts.batches:
        computed = {
            (group, number): advantage
            for group, number, advantage in facts.query(
                f"SELECT grp, number, advantage FROM rollouts WHERE {TRAINED} AND dropped IS NULL "  # noqa: S608
                "AND turns = 1 AND step = ?",
                batch.batch.step,
            )
        }
        for sample, (group, number, _, _) in zip(batch.batch.samples, batch.origins, strict=False):
            expected = computed.get((group, number))
            if expected is None or not sample.loss_mask.any():
                continue
            looked += 1
            if abs(float(sample.advantages[sample.loss_mask].mean()) - expected) > 1e-4 * (1 + abs(expected)):
                wrong += 1
                example = example or (batch.batch.step, group, number)
    if looked < _MIN_SAMPLES:
        return None
    measured = f"{wrong} of {looked} samples have an advantage that differs from that of their rollout"
    if share_interval(wrong, looked)[0] < 0.05 or example is None:
        return f"{measured} (at most 5 %)"
    step, group, number = example
    return facts.finding(
        "advantages_misplaced",
        measured,
        "the samples of the batch are out of order, so advantages belong to other rollouts",
        "check how groups become samples (orchestrator/batch.py)",
        evidence=[
            (
                f"step {step}, group {group}",
                facts.rollouts(step, "--group", group, "--rollout", number, "--json"),
            )
        ],
        confidence="sure",
        share=wrong / looked,
    )


def untrained_tokens(facts: DiagnosisFacts) -> Finding | str | None:
    """Find sampled tokens that are missing in the loss mask: the end of replies, or many of them."""
    ended = without_end = sampled_tokens = trained_tokens = 0
    example = None
    known = {
        (step, group, number): (tokens, turns)
        for step, group, number, tokens, turns in facts.query(
            "SELECT step, grp, number, completion_tokens, turns FROM rollouts WHERE split = 'train' AND "
            "retried = 0 AND dropped IS NULL AND truncated = 0 AND cut = 0 AND reward IS NOT NULL "
            "AND step <= {until}"
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
            sampled_tokens, trained_tokens = sampled_tokens + sampled[0], trained_tokens + count
            if sampled[0] - count == sampled[1]:
                without_end += 1
                example = example or (batch.batch.step, group, number)
    if ended < 10:
        return None
    share = trained_tokens / max(1, sampled_tokens)
    if share_interval(without_end, ended)[0] >= 0.7 and example is not None:
        step, group, number = example
        return facts.finding(
            "end_not_trained",
            f"In {without_end} of {ended} complete replies, exactly one token per turn is not trained",
            "the token that ends a reply is masked, so the policy never learns to end",
            "let the loss mask cover the end token",
            evidence=[
                (
                    f"step {step}: the mask has one token fewer than were sampled",
                    facts.rollouts(step, "--group", group, "--rollout", number),
                )
            ],
            confidence="sure",
            share=without_end / ended,
        )
    if share < 0.7:
        return facts.finding(
            "tokens_not_trained",
            f"Only {share:.0%} of the sampled tokens of complete replies are in the loss mask",
            "the loss mask leaves out most of the replies",
            "check how the batch is built (orchestrator/batch.py), and what a custom environment returns",
            evidence=[("tokens and masks", facts.command("replay", "--step", facts.batches[-1].batch.step))],
            share=share,
        )
    return f"{share:.0%} of the sampled tokens of complete replies are trained (at least 70 %)"


def kl_of_the_wrong_sign(facts: DiagnosisFacts) -> Finding | str | None:
    """Find a loss that subtracts the KL penalty instead of adding it."""
    loss = facts.run.setting("trainer.loss") or {}
    coefficient, per_token = float(loss.get("kl_coef") or 0.0), loss.get("normalization", "token") == "token"
    other_terms = loss.get("entropy_coef") or loss.get("kl_estimator") not in (None, "k3")
    if not coefficient or not per_token or other_terms:
        return None
    added, expected = list[float](), list[float]()
    for batch in facts.batches:
        kl = batch.record["values"].get("reference_kl")
        total = batch.record["values"].get("loss")
        mask = batch.column("loss_mask").astype(bool) & np.isfinite(batch.logprobs)
        if kl is None or total is None or not mask.any():
            continue
        ratios = np.exp(np.clip(batch.logprobs[mask] - batch.column("logprobs")[mask], -10, 10))
        policy = -float((ratios * batch.column("advantages")[mask]).sum()) / int(
            batch.column("loss_mask").sum()
        )
        added.append(total - policy)
        expected.append(coefficient * kl)
    low, high = slope_interval(np.array(expected), np.array(added), 2.0)
    if len(added) < 3 or rms(np.array(expected)) < 1e-6:
        return None
    measured = f"the loss minus the policy-gradient loss is {low:.2f} to {high:.2f} times kl_coef x KL"
    if high > -0.3:
        return measured
    return facts.finding(
        "kl_wrong_sign",
        f"{measured[0].upper()}{measured[1:]}, not 1",
        "the KL penalty has the wrong sign, so it drives the policy away from the reference model",
        "check the sign of trainer.loss.kl_coef, and how the loss adds the KL term",
        evidence=[("the divergence by step", facts.metrics("reference_kl"))],
        confidence="sure" if high < -0.7 and low > -1.3 else "likely",
        slope=(low + high) / 2,
    )


_BOUNDS = (
    *("masked_low", "masked_high", "clipped_low", "clipped_high", "corrected_low"),
    "corrected_high",
)
"""Metric names for the shares of tokens that the loss leaves out."""


def bounds_too_narrow(facts: DiagnosisFacts) -> Finding | str | None:
    """Find loss bounds that leave out most tokens though sampler and trainer agree."""
    trained = [step for step in facts.steps if step.value("trainer/trained_tokens")][-10:]
    shares = [min(1.0, sum(step.value(f"trainer/{name}") or 0.0 for name in _BOUNDS)) for step in trained]
    known = [abs(value) for step in trained if (value := step.value("trainer/mismatch_kl")) is not None]
    if len(shares) < 3 or not known:
        return None
    narrow = _narrow(facts.run.setting("trainer.loss") or {})
    measured = f"{np.median(shares):.0%} of the trained tokens outside the bounds of the loss"
    if np.median(shares) < 0.3 or not (np.median(known) <= 0.02 or narrow):
        return f"{measured} (at most 30 %)"
    return facts.finding(
        "bounds_too_narrow",
        f"{measured}, at a mismatch of only {np.median(known):.2g} nats",
        "the bounds of the ratio are too narrow: rounding alone moves tokens outside of them, so almost "
        "nothing is trained",
        "use the default bounds of trainer.loss (mask_ratio_low, mask_ratio_high, clip_low, clip_high)",
        evidence=[
            ("the excluded tokens", facts.metrics("masked_low", "masked_high")),
            ("the mismatch", facts.metrics("mismatch_kl")),
        ],
        confidence="sure",
        share=float(np.median(shares)),
    )


def _narrow(loss: Mapping[str, Any]) -> bool:
    """Return True if the upper bound of a ratio is within 0.01 of 1."""
    above = [
        loss.get("mask_ratio_high"),
        1.0 + loss["clip_high"] if loss.get("clip_high") is not None else None,
    ]
    return any(bound is not None and bound < 1.01 for bound in above)


def no_gradient(facts: DiagnosisFacts) -> Finding | str | None:
    """Find steps with a gradient of 0 though rewards differ."""
    spread = facts.values("orchestrator/batch/with_spread")
    norms = [norm for step, norm in facts.values("trainer/grad_norm").items() if spread.get(step, 0.0) > 0.3]
    if len(norms) < 3 or facts.run.setting(LORA_ALPHA) == 0:
        return None
    share = sum(norm == 0.0 for norm in norms) / len(norms)
    measured = f"{share:.0%} of the steps with differing rewards have a gradient of 0"
    if share < 0.5:
        return f"{measured} (at most 50 %)"
    return facts.finding(
        "no_gradient",
        measured[0].upper() + measured[1:],
        "the loss leaves out all tokens that have an advantage, or advantages are lost on the way to it",
        "check trainer.loss, orchestrator.mask_truncated_completions, and your own loss",
        evidence=[
            ("gradients, and the tokens that the loss leaves out", facts.metrics("grad_norm", "masked_"))
        ],
        confidence="sure",
        share=share,
    )


def penalty_too_strong(facts: DiagnosisFacts) -> Finding | str | None:
    """Find a KL or an entropy term that outweighs the rewards, in a run that does not learn."""
    loss, std = facts.run.setting("trainer.loss") or {}, facts.early_mean("orchestrator/reward/std")
    terms = [(name, float(loss.get(name) or 0.0), limit) for name, limit in _MOST_PENALTY.items()]
    name, size, limit = max(terms, key=lambda term: term[1] / term[2])
    if not size or not std:
        return None
    measured = f"{name} is {size / std:.2g} times the standard deviation of the rewards"
    if size < limit * std or facts.has_risen:
        return f"{measured} (at most {limit})"
    return facts.finding(
        "penalty_too_strong",
        measured[0].upper() + measured[1:],
        f"the term outweighs the rewards (trainer.loss.{name} = {size:g})",
        f"lower trainer.loss.{name}: usual are 0.001 to 0.1" if name == "kl_coef" else "use 0 to 0.01",
        evidence=[
            ("the term and the reward by step", facts.metrics("reference_kl", "entropy", "reward/mean"))
        ],
        ratio=size / std,
    )


_MOST_PENALTY = {"kl_coef": 2.0, "entropy_coef": 0.3}
"""Largest coefficients of the terms of the loss, in standard deviations of the rewards."""


def update_against_advantages(facts: DiagnosisFacts) -> Finding | str | None:
    """Find updates that do not make tokens with a positive advantage more likely than others."""
    values = list(facts.values("trainer/update/agreement").values())
    if len(values) < 3:
        return None
    low, high = mean_interval(values, 2.0)
    measured = f"updates agree {np.mean(values):+.2f} with the advantages ({low:+.2f} to {high:+.2f})"
    if high > 0.0:
        return measured
    return facts.finding(
        "update_against_advantages",
        f"{measured[0].upper()}{measured[1:]}",
        "each step makes the worse replies more likely: the loss has the wrong sign, or another term of it "
        "outweighs the rewards",
        "check trainer.loss, and your own loss",
        evidence=[("the agreement by step", facts.metrics("update/agreement"))],
        agreement=float(np.mean(values)),
    )


CHECKS = (
    unsampled_tokens,
    shifted_logprobs,
    advantages_against_rewards,
    misplaced_advantages,
    untrained_tokens,
    kl_of_the_wrong_sign,
    penalty_too_strong,
    bounds_too_narrow,
    no_gradient,
    update_against_advantages,
)
