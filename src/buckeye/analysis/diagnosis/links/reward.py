"""Checks of the reward: it depends on the reply, on this reply, with the right sign, often enough."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from buckeye.analysis.diagnosis.facts import LONG, RECENT, DiagnosisFacts, Place, Result
from buckeye.analysis.diagnosis.prompts import token_features
from buckeye.analysis.diagnosis.statistics import centered, cross_validated_fit, is_below, share_interval
from buckeye.monitor.finding import Finding

_EQUAL = 1e-6
_NEARLY_ALL = 0.8
_MIN_GROUPS = 20
_MAX_GROUPS = 100
_MIN_PAIRS = 10
_FOLDS = 4
_LEAST_SPREAD = 0.1
_USEFUL_GROUPS = 100
_MOST_ALIKE = 0.3
_MOST_UNEXPLAINED = 0.02
_OFTEN = 0.3
_MANY_TIMES = 3.0
_EQUAL_SPREAD = 0.99
"""Shaping that cancels the rewards differs exactly as much as they do."""
_SCORE = re.compile(r"score|acc|correct|exact|success|solv|win|pass|match|grade", re.IGNORECASE)


def neighbor_reward(facts: DiagnosisFacts) -> Result:
    """Find rewards that fit the reply of another rollout better than their own.

    A ridge regression predicts the rewards, centered by group, from the tokens of the own reply, and of its
    neighbors: in the group, and in the order in which rollouts ended. Groups of one fold are predicted from
    the others.
    """
    found = dict[Place, tuple[npt.NDArray[np.float64], float, float]]()
    for place, sample, (reward, at) in facts.samples("reward, coalesce(ended, 0.0)"):
        if place not in found:
            found[place] = (token_features(sample.token_ids[sample.loss_mask]), reward, at)
    groups = defaultdict[tuple[int, int], list[int]](list)
    for row, (step, group, _) in enumerate(found):
        groups[step, group].append(row)
    members = [np.array(rows) for rows in groups.values() if len(rows) > 1][-_MAX_GROUPS:]
    if len(members) < _MIN_GROUPS:
        return None
    order = np.concatenate(members)
    features, rewards, ended = (np.array(column) for column in zip(*found.values(), strict=True))
    relative = np.concatenate([rewards[rows] - rewards[rows].mean() for rows in members])
    folds = np.concatenate([np.full(len(rows), at % _FOLDS) for at, rows in enumerate(members)])
    if relative.std() < _EQUAL:
        return None
    by_time = order[np.argsort(ended[order], kind="stable")]
    neighbors = {
        f"the {which} rollout of {what}": _shift(rings, places)
        for which, places in (("next", 1), ("previous", -1))
        for what, rings in (("its group", members), ("those that ended", [by_time]))
    }

    def fit(rows: npt.NDArray[np.int64]) -> float:
        chosen = features[rows[order]]
        return cross_validated_fit(chosen - chosen.mean(0), relative, folds)

    own = fit(np.arange(len(found)))
    which, best = max(((which, fit(rows)) for which, rows in neighbors.items()), key=lambda item: item[1])
    measured = f"rewards correlate {own:.2f} with their own replies, {best:.2f} with a neighbor's"
    if best < 0.3 or best < own + 8 / math.sqrt(len(order)):
        return measured
    return facts.finding("neighbor_reward", f"{measured}: {which}", *list(found)[order[-1]])


def _shift(rings: Sequence[npt.NDArray[np.int64]], places: int) -> npt.NDArray[np.int64]:
    """Return, by row, the row that is `places` further in its ring."""
    found = np.zeros(max(int(ring.max()) for ring in rings) + 1, np.int64)
    for ring in rings:
        found[ring] = np.roll(ring, -places)
    return found


def grader_disagrees(facts: DiagnosisFacts) -> Result:
    """Find equal replies with different rewards, in a run that does not learn.

    The measured quantity is the share of the rewards' variance that remains among equal replies to the same
    task. If few replies are equal, only `--try` can detect this.
    """
    rows, other = _repeated_replies(facts)
    if len(rows) < _MIN_PAIRS:
        return None
    counts, means, squares = np.array([row[:3] for row in rows], float).T
    within = float((counts * np.maximum(0.0, squares - means**2)).sum() / (counts - 1).sum())
    ((total,),) = facts.query(
        "SELECT avg(reward * reward) - avg(reward) * avg(reward) FROM rollouts WHERE {trained}"
    )
    share = within / total if total > _EQUAL else 0.0
    measured = f"{len(other)} of {len(rows)} repeated replies got different rewards"
    low = share_interval(len(other), len(rows), 2.0)[0]
    if len(other) < 3 or low < 0.02 or facts.has_risen or share < 0.4:
        return f"{measured}; chance is {share:.0%} of their variance (at most 50 %)"
    *_, apart, step, group = max(other, key=lambda row: row[3])
    seen = f"{measured}, up to {apart:g} apart; chance is {share:.0%} of the variance of the rewards"
    return facts.finding("grader_random", seen, step, group, confidence="sure" if low > 0.1 else "likely")


def _repeated_replies(facts: DiagnosisFacts) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return all replies that a task got more than once, and those with different rewards.

    A row has count, mean, mean square and range of the rewards, and the last step and group.
    """
    rows = facts.query(
        "SELECT count(*), avg(reward), avg(reward * reward), max(reward) - min(reward), max(step), max(grp) "
        "FROM rollouts WHERE {trained} AND text IS NOT NULL GROUP BY env, task, text HAVING count(*) > 1"
    )
    return rows, [row for row in rows if row[3] > _EQUAL]


def sometimes_random(facts: DiagnosisFacts) -> Result:
    """Find some equal replies with different rewards, in a run that does not learn.

    A judge with noise gives nearly all of them different rewards; state that rollouts share changes some.
    This is evidence only if no other link is broken, so it is not in `CHECKS`.
    """
    if not facts.is_flat():
        return None
    rows, other = _repeated_replies(facts)
    low, high = share_interval(len(other), len(rows), 2.0)
    if low < 0.05 or high > _NEARLY_ALL:
        return None
    seen = f"{len(other)} of {len(rows)} repeated replies got different rewards"
    return facts.finding("grader_random", seen, *other[-1][4:])


def shared_rewards(facts: DiagnosisFacts) -> Result:
    """Find groups in which different replies always have the same reward, of at least three values."""
    rows = facts.query(
        "SELECT max(reward) - min(reward), avg(reward), max(step), grp FROM rollouts "
        "WHERE {trained} AND text IS NOT NULL GROUP BY step, grp HAVING count(DISTINCT text) > 2"
    )
    if len(rows) < _MIN_GROUPS:
        return None
    equal = [row for row in rows if row[0] < _EQUAL]
    measured = f"in {len(equal)} of {len(rows)} groups of different replies all have the same reward"
    values = {round(row[1], 6) for row in equal}
    if share_interval(len(equal), len(rows), 2.0)[0] < _NEARLY_ALL or len(values) < 3:
        return measured
    return facts.finding(
        "shared_rewards", f"{measured}, and rewards have {len(values)} values", *equal[-1][2:]
    )


def grader_never_pays(facts: DiagnosisFacts) -> Result:
    """Find a grader that gave 0 for many steps while other reward components varied."""
    rows = facts.query(
        "SELECT count(*), part.key, count(DISTINCT step) FROM rollouts, json_each(components) part "
        "WHERE {trained} AND step > ? AND part.key LIKE 'grade/%' GROUP BY env, part.key "
        "HAVING max(abs(part.value)) = 0 AND max(reward) > min(reward) AND count(*) >= 100 "
        "AND count(DISTINCT step) >= 3",
        facts.last - 3 * RECENT,
    )
    if not rows:
        return None
    count, name, steps = max(rows)
    return facts.finding(
        "grader_never_pays", f"{name} gave 0 to all {count} rollouts of the last {steps} steps"
    )


def shaping_outweighs(facts: DiagnosisFacts) -> Result:
    """Find shaping that differs more within groups than the rewards, in the first third of a run."""
    rows = facts.query(
        "SELECT shaped_reward - reward, reward, step * 1000003 + grp FROM rollouts WHERE {trained} "
        "AND shaped_reward IS NOT NULL AND step <= ? LIMIT 20000",
        facts.first_third,
    )
    shaping, reward, groups = np.array(rows, float).reshape(-1, 3).T
    if len(rows) < 40 or np.abs(shaping).max() < _EQUAL:
        return None
    ratio = float(centered(shaping, groups).std() / max(_EQUAL, centered(reward, groups).std()))
    measured = f"within groups, shaping at first differs {ratio:.2g} times as much as the rewards"
    return (
        f"{measured} (at most 1)" if ratio < _EQUAL_SPREAD else facts.finding("shaping_outweighs", measured)
    )


def reward_sign(facts: DiagnosisFacts) -> Result:
    """Find a reward that falls when a score among its components, or the evaluation, rises."""
    pairs = defaultdict[str, list[tuple[float, float, int]]](list)
    for reward, components, step, group in facts.query(
        "SELECT reward, components, step, grp FROM rollouts WHERE {trained} ORDER BY step DESC LIMIT 4000"
    ):
        for name, value in json.loads(components or "{}").items():
            if _SCORE.search(name) and math.isfinite(value):
                pairs[name].append((reward, value, step * 1_000_003 + group))
    measured = list[str]()
    for name, rows in pairs.items():
        value = _correlation_in_groups(np.array(rows, float))
        if value is not None:
            measured.append(f"the reward correlates {value:+.2f} with `{name}`")
        if value is not None and value <= -0.5:
            return facts.finding("reward_sign", f"within groups {measured[-1]}")
    return _against_evaluation(facts) or _only_negative(facts) or "; ".join(measured) or None


def _only_negative(facts: DiagnosisFacts) -> Finding | None:
    """Return a `possible` finding if no reward is above 0."""
    ((low, high),) = facts.query("SELECT min(reward), max(reward) FROM rollouts WHERE {trained}")
    if low is None or high > 0.0 or low >= 0.0:
        return None
    seen = f"all rewards are between {low:g} and {high:g}, so doing nothing may be best"
    return facts.finding("reward_sign", seen, confidence="possible")


def _correlation_in_groups(rows: npt.NDArray[np.float64]) -> float | None:
    """Return the correlation of the first two columns, centered by the third; None if one is constant."""
    if len(rows) < 40:
        return None
    first, second = (centered(column, rows[:, 2]) for column in rows[:, :2].T)
    if min(first.std(), second.std()) < _EQUAL:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _against_evaluation(facts: DiagnosisFacts) -> Finding | None:
    """Return a finding if the evaluation falls while the training reward rises."""
    if len(facts.evaluations) < 2 or not facts.has_risen:
        return None
    best, last = max(facts.evaluations, key=np.mean), facts.evaluations[-1]
    if min(len(best), len(last)) < _MIN_PAIRS or not is_below(last, best, 3.0):
        return None
    change = f"from {np.mean(best):.2f} to {np.mean(last):.2f}"
    return facts.finding("reward_sign", f"the training reward rises, and the evaluation falls {change}")


def component_outweighed(facts: DiagnosisFacts) -> Result:
    """Find a rewarded component that falls below a third of its first mean while the reward rises.

    Or find a score of a small weight that does not rise. The weights are those of a least-squares fit of the
    rewards.
    """
    rows = facts.query(
        "SELECT step, reward, components FROM rollouts WHERE {trained} AND components IS NOT NULL "
        "AND (step <= ? OR step > ?)",
        facts.early,
        facts.last - RECENT,
    )
    scores = [json.loads(row[2] or "{}") for row in rows]
    names = sorted(set[str]().union(*scores))
    if not facts.has_risen or len(rows) < 40 or len(names) < 2:
        return None
    table = np.array([[score.get(name, 0.0) for name in names] for score in scores], float)
    steps, rewards = np.array([row[:2] for row in rows], float).T
    weights, *_ = np.linalg.lstsq(table, rewards, rcond=None)
    if float(np.var(rewards - table @ weights)) > _MOST_UNEXPLAINED * float(np.var(rewards)):
        return None
    first, last = table[steps <= facts.early], table[steps > facts.early]
    for column in np.flatnonzero(weights > _EQUAL):
        before, after = first[:, column], last[:, column]
        if is_below(after, before) and after.mean() < before.mean() / 3:
            seen = f"`{names[column]}` falls from {before.mean():.2f} to {after.mean():.2f}"
            return facts.finding("component_outweighed", f"{seen}, and the reward rises")
        is_small = weights[column] < weights.max() / _MANY_TIMES and _SCORE.search(names[column])
        if (
            is_small
            and not is_below(before, after, 2.0)
            and after.mean() < _NEARLY_ALL * table[:, column].max()
        ):
            seen = f"`{names[column]}` stays at {after.mean():.2f}, with a weight of {weights[column]:.2g}"
            return facts.finding(
                "component_outweighed",
                f"{seen}, and the reward rises by `{names[int(weights.argmax())]}`, with {weights.max():.2g}",
            )
    return f"{len(names)} components make up the reward, and none of them is lost"


def settled_below_best(facts: DiagnosisFacts) -> Result:
    """Find a policy that nearly always gets one reward in the end, and got higher ones at first."""
    if not facts.has_risen:
        return None
    rewards = "SELECT round(reward, 6) FROM rollouts WHERE {trained} AND step"
    late = [reward for (reward,) in facts.query(f"{rewards} > ?", facts.last - RECENT)]
    first = [reward for (reward,) in facts.query(f"{rewards} <= ?", facts.early)]
    if min(len(late), len(first)) < 40:
        return None
    usual, count = Counter(late).most_common(1)[0]
    above = sum(reward > usual for reward in first)
    higher = above / len(first)
    measured = (
        f"{count / len(late):.0%} of the last rewards are {usual:g}, {higher:.0%} of the first were higher"
    )
    if share_interval(count, len(late), 2.0)[0] < 0.9 or share_interval(above, len(first), 2.0)[0] < 0.03:
        return measured
    return facts.finding("settled_below_best", measured)


def unlearned_rewards(facts: DiagnosisFacts) -> Result:
    """Find a long run that does not learn, though rewards differ within its groups.

    This is evidence only if no other link is broken, so it is not in `CHECKS`.
    """
    spread = facts.values("orchestrator/batch/with_spread").values()
    if not facts.is_flat(1.5 * LONG):
        return None
    evaluations = facts.evaluations
    is_better = len(evaluations) > 1 and is_below(evaluations[0], evaluations[-1], 1.0)
    if np.mean([*spread]) < _OFTEN or is_better:
        return None
    seen = f"rewards differ in {np.mean([*spread]):.0%} of the groups, and {facts.outcome}"
    return facts.finding("rewards_unlearned", seen)


def rare_rewards(facts: DiagnosisFacts) -> Result:
    """Find groups too small for rewards that are rare.

    Nothing is measured if the rollouts themselves are equal. With a share p of rewarded rollouts, a group of
    n has spread with probability 1 - p^n - (1 - p)^n.
    """
    batches = [step for step in facts.batch_steps if step.value("orchestrator/batch/with_spread") is not None]
    names = ("alike", "groups", "rollouts", "with_spread")
    alike, groups, rollouts, spread = (
        np.array([step.value(f"orchestrator/batch/{name}") or 0.0 for step in batches]) for name in names
    )
    if len(batches) < 3 or alike.mean() > _MOST_ALIKE:
        return None
    useful, count = float((spread * groups).sum()), max(1.0, float(groups.sum()))
    share, size, per_step = useful / count, float(rollouts.sum()) / count, useful / len(batches)
    third = max(3, len(batches) // 3)
    at_first = float((spread * groups)[:third].sum()) / max(1.0, float(groups[:third].sum()))
    measured = f"{share:.1%} of the groups have differing rewards, {per_step:.1f} a step"
    ((paid,),) = facts.query(
        "SELECT coalesce(avg(reward > low + 1e-6), 0.0) FROM rollouts, "
        "(SELECT min(reward) low FROM rollouts WHERE {trained}) WHERE {trained}"
    )
    is_rare = max(share, at_first) < _LEAST_SPREAD and 0.0 < paid < 0.5 and size > 1.0 and groups.sum() >= 30
    if not is_rare or facts.has_risen:
        return f"{measured} (at least {_LEAST_SPREAD:.0%})"
    needed = math.ceil(_USEFUL_GROUPS / per_step) if per_step else math.inf
    wanted = min(128, math.ceil(math.log(0.5) / math.log1p(-paid)))
    return facts.finding(
        "rare_rewards",
        f"1 of {1 / paid:.0f} rollouts gets a reward, so in groups of {size:.0f} only {measured}: "
        f"{_USEFUL_GROUPS} useful groups take {needed} steps. In groups of {wanted}, every second is useful",
    )


def one_environment_dominates(facts: DiagnosisFacts) -> Result:
    """Find an environment whose rewards are so large that the others have no share of the advantages."""
    rows = facts.query(
        "SELECT env, sum(abs(advantage)), count(*), avg(reward * reward) > avg(reward) * avg(reward) "
        "FROM rollouts WHERE {trained} AND dropped IS NULL AND advantage IS NOT NULL AND step <= ? "
        "GROUP BY env",
        facts.first_third,
    )
    total, count = sum(row[1] for row in rows), sum(row[2] for row in rows)
    if len(rows) < 2 or count < 40 or total <= 0.0:
        return None
    name, size, number, _ = max(rows, key=lambda row: row[1] / row[2])
    share, expected = size / total, number / count
    measured = f"`{name}` has {share:.0%} of the advantages, with {expected:.0%} of the rollouts"
    rest_per_rollout = (total - size) / max(1, count - number)
    if sum(row[3] for row in rows) < 2 or size / number < 10 * rest_per_rollout:
        return f"{measured} (at most 10 times the others' per rollout)"
    return facts.finding("one_environment_dominates", measured)


CHECKS = (
    neighbor_reward,
    shared_rewards,
    grader_disagrees,
    grader_never_pays,
    shaping_outweighs,
    component_outweighed,
    reward_sign,
    settled_below_best,
    one_environment_dominates,
    rare_rewards,
)
