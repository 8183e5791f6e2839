"""Checks of advantages and loss: sign, placement, mask, bounds, KL term."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, combinations, groupby, islice
from operator import itemgetter
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from buckeye.analysis.diagnosis.facts import LEAST_TRAINED, LONG, DiagnosisFacts, Place, Result
from buckeye.analysis.diagnosis.statistics import SURE, mean_interval, rms, share_interval, slope_interval
from buckeye.config.rewards import AdvantageConfig, CustomAdvantageConfig
from buckeye.envs.base import Task
from buckeye.launch.changed_settings import settings_history
from buckeye.monitor.finding import Finding
from buckeye.monitor.rollouts import RecordedRollout, read_rollouts
from buckeye.orchestrator.advantages import Scored, batch_advantages, shaped_turn_rewards
from buckeye.runs.trained_step import TrainedStep

_MIN_TOKENS = 40
_MIN_PAIRS = 20
_MAX_PAIRS = 100_000
_MOST_COMMON = 0.8
_FIRST_UPDATES = 4
_LEAST_AGREEMENT = 0.1
"""Least mean cosine of log-prob changes and advantages in the first updates of a run that learns."""
LORA_ALPHA = "trainer.model.experimental.lora.alpha"


def unsampled_tokens(facts: DiagnosisFacts) -> Result:
    """Find tokens in the loss mask that no policy has sampled."""
    tokens = facts.tokens
    if len(tokens) < _MIN_TOKENS:
        return None
    unsampled = tokens.unsampled
    measured = f"{unsampled.mean():.1%} of the trained tokens were never sampled"
    if share_interval(int(unsampled.sum()), len(tokens))[0] < 0.01:
        return f"{measured} (at most 1 %)"
    return facts.finding("mask_misplaced", measured, int(tokens.step[unsampled][0]), confidence="sure")


def shifted_logprobs(facts: DiagnosisFacts) -> Result:
    """Find trainer log-probs that belong to the adjacent token, or are those of random tokens."""
    shifted = facts.tokens.shifted_by(facts.rounding_tolerance)
    if facts.tokens.is_random_to_trainer:
        gap = rms(facts.tokens.initial_logprob_gap())
        seen = f"trainer and sampler differ by {gap:.3f} nats on the first weights, as if tokens were random"
        return facts.finding("mask_misplaced", seen, facts.early)
    if shifted is None:
        return None
    place, here, least = shifted
    seen = (
        f"trainer and sampler differ by {here:.3f} nats (root mean square), and by {least:.3g} from the "
        f"log-prob one token {'before' if place > 0 else 'after'}"
    )
    step = int(facts.tokens.step[facts.tokens.fresh][0])
    return facts.finding("mask_misplaced", seen, step, confidence="sure")


def advantages_against_rewards(facts: DiagnosisFacts) -> Result:
    """Find groups in which the rollout with the higher reward has the lower advantage, or the same."""
    kind = facts.run.setting("orchestrator.advantage.type")
    if kind == "components":  # the advantages need not have the order of the rewards
        return None
    rows = facts.query(
        "SELECT step, grp, shaped_reward, advantage FROM rollouts WHERE {trained} AND dropped IS NULL "
        "AND turns = 1 AND shaped_reward IS NOT NULL AND advantage IS NOT NULL AND step > ? "
        "ORDER BY step, grp",
        facts.last - 30,
    )
    compared = (
        (group, a[2] - b[2], a[3] - b[3])
        for group, members in groupby(rows, key=itemgetter(0, 1))
        for a, b in combinations(members, 2)
        if abs(a[2] - b[2]) > 1e-6
    )
    pairs = list(islice(compared, _MAX_PAIRS))
    wrong = [group for group, reward, advantage in pairs if reward * advantage < -1e-12]
    equal = [group for group, _, advantage in pairs if abs(advantage) < 1e-12]
    if len(pairs) < _MIN_PAIRS:
        return None
    if share_interval(len(equal), len(pairs))[0] > 0.5:
        seen = f"in {len(equal)} of {len(pairs)} pairs of rollouts, different rewards have the same advantage"
        return facts.finding("advantages_lost", seen, *equal[-1])
    low, share = share_interval(len(wrong), len(pairs))[0], len(wrong) / len(pairs)
    measured = (
        f"in {share:.0%} of {len(pairs)} pairs of rollouts, the one with the higher reward has the lower "
        "advantage"
    )
    if low < 0.02:
        return measured
    return facts.finding(
        "advantage_sign" if low > 0.7 else "advantages_misplaced",
        measured,
        *wrong[-1],
        confidence="likely" if kind == "custom" else "sure",
    )


def no_baseline(facts: DiagnosisFacts) -> Result:
    """Find advantages that nearly all have one sign and size, in a run that does not learn."""
    ((count, mean, square),) = facts.query(
        "SELECT count(*), avg(advantage), avg(advantage * advantage) FROM rollouts WHERE {trained} "
        "AND dropped IS NULL AND advantage IS NOT NULL"
    )
    if count < _MIN_TOKENS or not square:
        return None
    measured = f"{mean * mean / square:.0%} of the size of the advantages is their common mean"
    if not facts.is_flat() or mean * mean < _MOST_COMMON * square:
        return measured
    return facts.finding("no_baseline", f"{measured} ({mean:.3g})", facts.early)


def misplaced_advantages(facts: DiagnosisFacts) -> Result:
    """Find advantages that the settings do not define, or that are at other rollouts, turns or tokens."""
    settings, since = _advantage_settings(facts)
    groups, samples = dict[tuple[int, int], bool](), dict[Place, bool]()
    for kept in facts.batches:
        recorded = _trained_rollouts(facts, kept)
        if settings is not _UNKNOWN and kept.batch.step >= since:
            groups |= _recompute(recorded, settings, kept.batch.step)
        if not facts.run.setting("orchestrator.teacher"):  # it changes the advantage of each token
            samples |= _compare_samples(facts, kept, recorded)
    kinds: tuple[tuple[Mapping[Any, bool], int, str], ...] = (
        (groups, 10, "groups have other advantages than the settings define for their rewards"),
        (samples, 20, "samples have an advantage or tokens that differ from those of their rollout"),
    )
    found = [
        facts.share_finding(
            "advantages_misplaced",
            [place for place, wrong in is_wrong.items() if wrong],
            len(is_wrong),
            what,
            most=0.05,
            least=least,
            errors=SURE,
            confidence="sure",
        )
        for is_wrong, least, what in kinds
    ]
    findings = [one for one in found if isinstance(one, Finding)]
    return findings[0] if findings else "; ".join(one for one in found if isinstance(one, str)) or None


_ADVANTAGE = TypeAdapter[Any](AdvantageConfig | None)
_UNKNOWN = object()


def _advantage_settings(facts: DiagnosisFacts) -> tuple[Any, int]:
    """Return the settings of advantages, `_UNKNOWN` if they cannot be applied, and their first step."""
    key, settings = "orchestrator.advantage", facts.run.setting("orchestrator") or {}
    since = max((one.step for one in settings_history(facts.run.path) if one.key.startswith(key)), default=0)
    try:
        found = _ADVANTAGE.validate_python(settings["advantage"])
    except (KeyError, ValidationError):  # settings of another version of Buckeye
        return _UNKNOWN, since
    return _UNKNOWN if isinstance(found, CustomAdvantageConfig) else found, since


def _trained_rollouts(facts: DiagnosisFacts, kept: TrainedStep) -> list[RecordedRollout]:
    """Return the recorded rollouts of a batch; none if some are unreadable, or of another attempt."""
    recorded, unreadable = read_rollouts(facts.run.path, kept.batch.step) if kept.origins else ([], 0)
    if unreadable:
        return []
    return [one for one in recorded if one.dropped is None and not one.retried and one.reward is not None]


def _recompute(recorded: Sequence[RecordedRollout], settings: Any, step: int) -> dict[tuple[int, int], bool]:
    """Return, by step and group, True if the advantages are not those of the rewards."""
    groups = defaultdict[int, list[RecordedRollout]](list)
    for rollout in recorded:
        groups[rollout.group].append(rollout)
    expected = batch_advantages([list(map(_as_scored, group)) for group in groups.values()], settings)
    return {
        (step, number): not _are_equal(
            list(chain.from_iterable(rollout.advantages or () for rollout in group)),
            list(chain.from_iterable(advantages)),
        )
        for (number, group), advantages in zip(groups.items(), expected, strict=True)
    }


def _are_equal(values: Sequence[float] | np.ndarray, others: Sequence[float] | np.ndarray) -> bool:
    return len(values) == len(others) and np.allclose(values, others, rtol=1e-3, atol=1e-5)


def _as_scored(rollout: RecordedRollout) -> Scored:
    """Return the reward and the turn rewards, shaped, as they were compared within the group."""
    reward = rollout.reward if rollout.shaped_reward is None else rollout.shaped_reward
    assert reward is not None
    assert rollout.reward is not None
    added = reward - rollout.reward
    return Scored(
        reward=reward,
        turn_rewards=shaped_turn_rewards(rollout.turn_rewards or None, rollout.turns, rollout.reward, added),
        turn_lengths=(),
        task=Task(id=rollout.task_id, messages=()),
        replies=(),
        components=rollout.components,
    )


def _compare_samples(
    facts: DiagnosisFacts, kept: TrainedStep, recorded: Sequence[RecordedRollout]
) -> dict[Place, bool]:
    """Return, by place, True if a sample has advantages or tokens that its rollout does not have."""
    rollouts = {(one.group, one.number): one for one in recorded if one.advantages and not one.turns_branched}
    turns, found = kept.turns(), dict[Place, bool]()
    lengths = defaultdict[int, list[tuple[Place, int, int]]](list)
    for sample, origin, start in zip(kept.batch.samples, kept.origins, kept.starts, strict=False):
        rollout, mask = rollouts.get(origin[:2]), sample.loss_mask
        if rollout is None or not rollout.advantages or not mask.any():
            continue
        place = (kept.batch.step, *origin[:2])
        at = np.minimum(turns[start : start + len(mask)][mask], len(rollout.advantages) - 1)
        is_equal = _are_equal(sample.advantages[mask], np.array(rollout.advantages)[at])
        found[place] = found.get(place, False) or not is_equal
        if rollout.turns == 1:
            lengths[origin[0]].append((place, int(mask.sum()), rollout.completion_tokens))
            found[place] |= _is_other_reply(facts, rollout, sample.token_ids[mask].tolist())
    for members in lengths.values():
        _, trained, sampled = zip(*members, strict=True)
        if sorted(trained) == sorted(sampled):  # the same lengths, perhaps in another order
            found |= {place: True for place, ours, theirs in members if ours != theirs}
    return found


def _is_other_reply(facts: DiagnosisFacts, rollout: RecordedRollout, sampled: list[int]) -> bool:
    """Return True if as many tokens as the reply has are not its text."""
    last = rollout.messages[-1] if rollout.messages else {}
    reply = last.get("content") if last.get("role") == "assistant" else None  # else without room for a reply
    if facts.tokenizer is None or not isinstance(reply, str) or len(sampled) != rollout.completion_tokens:
        return False
    if "\ufffd" in reply:  # invalid bytes
        return False
    decoded = facts.tokenizer.decode(sampled, skip_special_tokens=False)
    return "".join(reply.split()) not in "".join(decoded.split())


def untrained_tokens(facts: DiagnosisFacts) -> Result:
    """Find sampled tokens that are missing in the loss mask: the end of replies, or many of them."""
    if facts.recorded_share < LEAST_TRAINED:
        seen = f"only {facts.recorded_share:.0%} of the tokens of complete replies are recorded and trained"
        return facts.finding("tokens_not_trained", seen, facts.early)
    sampled, trained = dict[Place, tuple[int, int]](), Counter[Place]()
    for place, sample, (is_incomplete, *row) in facts.samples("truncated OR cut, completion_tokens, turns"):
        if not is_incomplete:
            sampled[place] = (row[0], row[1])
            trained[place] += int(sample.loss_mask.sum())
    ended = [place for place, count in trained.items() if count]
    without_end = [place for place in ended if sampled[place][0] - trained[place] == sampled[place][1]]
    if len(ended) < 10:
        return None
    if share_interval(len(without_end), len(ended))[0] >= 0.7:
        seen = f"in {len(without_end)} of {len(ended)} complete replies, one token per turn is not trained"
        return facts.finding("end_not_trained", seen, *without_end[0], confidence="sure")
    share = sum(trained[place] for place in ended) / max(1, sum(sampled[place][0] for place in ended))
    measured = f"{share:.0%} of the sampled tokens of complete replies are trained (at least 70 %)"
    return measured if share >= LEAST_TRAINED else facts.finding("tokens_not_trained", measured, ended[-1][0])


def late_masks(facts: DiagnosisFacts) -> Result:
    """Find replies whose first tokens are missing in the loss mask."""
    what = "replies have first tokens that are not trained"
    return facts.share_finding(
        "start_not_trained",
        facts.late_masks,
        len(facts.read_prompts),
        what,
        most=0.3,
        least=8,
        confidence="sure",
    )


def kl_of_the_wrong_sign(facts: DiagnosisFacts) -> Result:
    """Find a loss that subtracts the KL penalty instead of adding it."""
    loss = facts.run.setting("trainer.loss") or {}
    coefficient, per_token = float(loss.get("kl_coef") or 0.0), loss.get("normalization", "token") == "token"
    other_terms = loss.get("entropy_coef") or loss.get("kl_estimator") not in (None, "k3")
    has_one_update = all(batch.record["values"].get("updates", 1) == 1 for batch in facts.batches)
    if not coefficient or not per_token or other_terms or not has_one_update:
        return None
    added, expected = list[float](), list[float]()
    for batch in facts.batches:
        kl = batch.record["values"].get("reference_kl")
        total = batch.record["values"].get("loss")
        masked = batch.column("loss_mask").astype(bool)
        mask = masked & np.isfinite(batch.logprobs)
        if kl is None or total is None or not mask.any():
            continue
        ratios = np.exp(np.clip(batch.logprobs[mask] - batch.column("logprobs")[mask], -10, 10))
        added.append(total + float((ratios * batch.column("advantages")[mask]).sum()) / int(masked.sum()))
        expected.append(coefficient * kl)
    low, high = slope_interval(np.array(expected), np.array(added), 2.0)
    if len(added) < 3 or rms(np.array(expected)) < 1e-6:
        return None
    measured = f"the loss minus the policy-gradient loss is {low:.2f} to {high:.2f} times kl_coef x KL"
    if high > -0.3:
        return measured
    return facts.finding(
        "kl_wrong_sign",
        f"{measured}, not 1",
        confidence="sure" if high < -0.7 and low > -1.3 else "likely",
    )


_BOUNDS = (
    *("masked_low", "masked_high", "clipped_low", "clipped_high", "corrected_low"),
    "corrected_high",
)
"""Metric names for the shares of tokens that the loss leaves out."""


def bounds_too_narrow(facts: DiagnosisFacts) -> Result:
    """Find loss bounds that leave out most tokens though sampler and trainer agree."""
    trained = [step for step in facts.steps if step.value("trainer/trained_tokens")][-10:]
    shares = [min(1.0, sum(step.value(f"trainer/{name}") or 0.0 for name in _BOUNDS)) for step in trained]
    known = [abs(value) for step in trained if (value := step.value("trainer/mismatch_kl")) is not None]
    if len(shares) < 3 or not known:
        return None
    loss = facts.run.setting("trainer.loss") or {}
    ratio, clip = loss.get("mask_ratio_high"), loss.get("clip_high")
    is_narrow = (ratio is not None and ratio < 1.01) or (clip is not None and clip < 0.01)
    measured = f"{np.median(shares):.0%} of the trained tokens outside the bounds of the loss"
    if np.median(shares) < 0.3 or not (np.median(known) <= 0.02 or is_narrow):
        return f"{measured} (at most 30 %)"
    seen = f"{measured}, at a mismatch of only {np.median(known):.2g} nats"
    return facts.finding("bounds_too_narrow", seen, confidence="sure")


def no_gradient(facts: DiagnosisFacts) -> Result:
    """Find steps with a gradient of 0 though rewards differ."""
    spread = facts.values("orchestrator/batch/with_spread")
    norms = [norm for step, norm in facts.values("trainer/grad_norm").items() if spread.get(step, 0.0) > 0.3]
    if len(norms) < 3 or facts.run.setting(LORA_ALPHA) == 0:
        return None
    share = sum(norm == 0.0 for norm in norms) / len(norms)
    measured = f"{share:.0%} of the steps with differing rewards have a gradient of 0"
    if share < 0.5:
        return f"{measured} (at most 50 %)"
    return facts.finding("no_gradient", measured, confidence="sure")


def penalty_too_strong(facts: DiagnosisFacts) -> Result:
    """Find a KL or an entropy term that outweighs the rewards, in a run that does not learn."""
    loss, std = facts.run.setting("trainer.loss") or {}, facts.early_mean("orchestrator/reward/std")
    terms = [(name, abs(float(loss.get(name) or 0.0)), limit) for name, limit in _MOST_PENALTY.items()]
    name, size, limit = max(terms, key=lambda term: term[1] / term[2])
    if not size or not std:
        return None
    measured = f"{name} is {size / std:.2g} times the standard deviation of the rewards"
    if size < limit * std or facts.has_risen:
        return f"{measured} (at most {limit})"
    return facts.finding("penalty_too_strong", measured)


_MOST_PENALTY = {"kl_coef": 2.0, "entropy_coef": 0.3}
"""Largest coefficients of the terms of the loss, in standard deviations of the rewards."""


def reference_moves(facts: DiagnosisFacts) -> Result:
    """Find a reference model that always equals the policy, though updates change the policy."""
    divergences = list(facts.values("trainer/reference_kl").values())
    changes = list(facts.values("trainer/update/logprob_change").values())
    if (
        not (facts.run.setting("trainer.loss") or {}).get("kl_coef")
        or len(divergences) < LONG // 2
        or not changes
    ):
        return None
    highest = max(map(abs, divergences))
    measured = (
        f"the policy is at most {highest:.2g} nats from the reference, an update moves it {max(changes):.2g}"
    )
    if max(changes) < 10 * facts.rounding_tolerance or highest > 0.01 * max(changes) ** 2:
        return measured
    return facts.finding("reference_moves", measured)


def noise_normalized(facts: DiagnosisFacts) -> Result:
    """Find large advantages in groups whose rewards differ by less than a hundredth of all rewards' spread.

    Dividing by the standard deviation of a group makes any difference large.
    """
    if facts.run.setting("orchestrator.advantage.std_norm") != "local":
        return None
    rows = facts.query(
        "SELECT max(reward) - min(reward) spread, sum(abs(advantage)), step, grp FROM rollouts "
        "WHERE {trained} AND dropped IS NULL AND advantage IS NOT NULL GROUP BY step, grp HAVING spread > 0"
    )
    if len(rows) < _MIN_PAIRS:
        return None
    widest = max(row[0] for row in rows)
    small = [row for row in rows if row[0] < 0.01 * widest]
    share = sum(row[1] for row in small) / max(1e-12, sum(row[1] for row in rows))
    measured = (
        f"groups whose rewards differ by less than {0.01 * widest:.2g} have {share:.0%} of the advantages"
    )
    if share < 0.3:
        return f"{measured} (at most 30 %)"
    return facts.finding("noise_normalized", measured, *small[-1][2:])


def update_against_advantages(facts: DiagnosisFacts) -> Result:
    """Find updates that do not make tokens with a positive advantage more likely than others."""
    values = list(facts.values("trainer/update/agreement").values())
    if len(values) < 3:
        return None
    low, high = mean_interval(values, 2.0)
    measured = f"updates agree {np.mean(values):+.2f} with the advantages ({low:+.2f} to {high:+.2f})"
    return measured if high > 0.0 else facts.finding("update_against_advantages", measured)


def updates_miss_advantages(facts: DiagnosisFacts) -> Result:
    """Find first updates that hardly follow the advantages, in a run that does not learn.

    This is evidence only if no other link is broken, so it is not in `CHECKS`.
    """
    values = list(facts.values("trainer/update/agreement").values())[:_FIRST_UPDATES]
    if not facts.is_flat(LONG) or len(values) < 3 or mean_interval(values, 2.0)[1] > _LEAST_AGREEMENT:
        return None
    seen = f"the first updates agree only {np.mean(values):+.2f} with the advantages, and {facts.outcome}"
    return facts.finding("update_against_advantages", seen)


CHECKS = (
    unsampled_tokens,
    shifted_logprobs,
    late_masks,
    advantages_against_rewards,
    misplaced_advantages,
    no_baseline,
    untrained_tokens,
    kl_of_the_wrong_sign,
    penalty_too_strong,
    reference_moves,
    noise_normalized,
    bounds_too_narrow,
    no_gradient,
    update_against_advantages,
)
