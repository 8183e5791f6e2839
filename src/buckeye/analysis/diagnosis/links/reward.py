"""Checks of the reward: it depends on the reply, on this reply, with the right sign, often enough."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from buckeye.analysis.diagnosis.facts import RECENT, TRAINED, DiagnosisFacts
from buckeye.analysis.diagnosis.prompts import reply_features
from buckeye.analysis.diagnosis.statistics import cross_validated_fit, is_below, share_interval
from buckeye.monitor.finding import Finding

Array = npt.NDArray[np.float64]

_EQUAL = 1e-6
_NEARLY_ALL = 0.8
_MIN_GROUPS = 20
_MAX_GROUPS = 100
_MIN_PAIRS = 10
_FOLDS = 4
_LEAST_SPREAD = 0.1
_USEFUL_GROUPS = 100
_MOST_ALIKE = 0.3
_SCORE = re.compile(r"score|acc|correct|exact|success|solv|win|pass|match|grade", re.IGNORECASE)


def neighbor_reward(facts: DiagnosisFacts) -> Finding | str | None:
    """Find rewards that fit the reply of another rollout better than their own.

    A ridge regression predicts the rewards, centered by group, from the tokens of the own reply, and of its
    neighbors: in the group, and in the order in which rollouts ended. Groups of one fold are predicted from
    the others.
    """
    names, features = reply_features(facts)
    known = {
        (step, group, number): (reward, ended or 0.0)
        for step in {name[0] for name in names}
        for group, number, reward, ended in facts.query(
            "SELECT grp, number, reward, ended FROM rollouts "  # noqa: S608
            f"WHERE {TRAINED} AND dropped IS NULL AND step = ?",
            step,
        )
    }
    groups = defaultdict[tuple[int, int], list[int]](list)
    for row, name in enumerate(names):
        if name in known:
            groups[name[:2]].append(row)
    members = [np.array(rows) for rows in groups.values() if len(rows) > 1][-_MAX_GROUPS:]
    if len(members) < _MIN_GROUPS:
        return None
    order = np.concatenate(members)
    rewards, ended = np.array([known.get(name, (math.nan, 0.0)) for name in names]).T
    centered = np.concatenate([rewards[rows] - rewards[rows].mean() for rows in members])
    folds = np.concatenate([np.full(len(rows), at % _FOLDS) for at, rows in enumerate(members)])
    if centered.std() < _EQUAL:
        return None
    by_time = order[np.argsort(ended[order], kind="stable")]
    neighbors = {
        f"the {which} rollout of {what}": _shift(rings, places)
        for which, places in (("next", 1), ("previous", -1))
        for what, rings in (("its group", members), ("those that ended", [by_time]))
    }

    def fit(rows: npt.NDArray[np.int64]) -> float:
        chosen = features[rows[order]]
        return cross_validated_fit(chosen - chosen.mean(0), centered, folds)

    own = fit(np.arange(len(names)))
    which, best = max(((which, fit(rows)) for which, rows in neighbors.items()), key=lambda item: item[1])
    measured = f"rewards correlate {own:.2f} with their own replies, {best:.2f} with a neighbor's"
    if best < 0.3 or best < own + 8 / math.sqrt(len(order)):
        return measured
    step, group, _ = names[order[-1]]
    return facts.finding(
        "neighbor_reward",
        measured[0].upper() + measured[1:],
        f"each rollout gets the reward of {which}",
        "return each reward with the rollout that it was computed for; look for a list that is shifted by "
        "one, or results in the order of their completion",
        evidence=[(f"replies and rewards of group {group}", facts.rollouts(step, "--group", group))],
        own=own,
        neighbor=best,
    )


def _shift(rings: Sequence[npt.NDArray[np.int64]], places: int) -> npt.NDArray[np.int64]:
    """Return, by row, the row that is `places` further in its ring."""
    found = np.zeros(max(int(ring.max()) for ring in rings) + 1, np.int64)
    for ring in rings:
        found[ring] = np.roll(ring, -places)
    return found


def grader_disagrees(facts: DiagnosisFacts) -> Finding | str | None:
    """Find equal replies with different rewards, in a run that does not learn.

    The measured quantity is the share of the rewards' variance that remains among equal replies to the same
    task. If few replies are equal, only `--try` can detect this.
    """
    rows = facts.query(
        "SELECT count(*), avg(reward), avg(reward * reward), max(reward) - min(reward), max(step), max(grp) "  # noqa: S608
        f"FROM rollouts WHERE {TRAINED} AND text IS NOT NULL GROUP BY env, task, text HAVING count(*) > 1"
    )
    if len(rows) < _MIN_PAIRS:
        return None
    other = [row for row in rows if row[3] > _EQUAL]
    table = np.array([row[:3] for row in rows], float)
    counts = table[:, 0]
    within = float((counts * np.maximum(0.0, table[:, 2] - table[:, 1] ** 2)).sum() / (counts - 1).sum())
    ((total,),) = facts.query(
        f"SELECT avg(reward * reward) - avg(reward) * avg(reward) FROM rollouts WHERE {TRAINED}"  # noqa: S608
    )
    share = within / total if total > _EQUAL else 0.0
    measured = f"{len(other)} of {len(rows)} repeated replies got different rewards"
    low = share_interval(len(other), len(rows), 2.0)[0]
    if len(other) < 3 or low < 0.02 or facts.has_risen or (share < 0.5 and low < 0.5):
        return f"{measured}; chance is {share:.0%} of their variance (at most 50 %)"
    _, _, _, apart, step, group = max(other, key=lambda row: row[3])
    return facts.finding(
        "grader_random",
        f"{measured}, up to {apart:g} apart; chance is {share:.0%} of the variance of the rewards",
        "the grade depends on more than the answer: chance, time, or earlier grading",
        "grade deterministically; `buckeye env check` grades twice",
        evidence=[(f"the same text in group {group} of step {step}", facts.rollouts(step, "--group", group))],
        confidence="sure" if low > 0.1 else "likely",
        share=share,
    )


def shared_rewards(facts: DiagnosisFacts) -> Finding | str | None:
    """Find groups in which different replies always have the same reward, of at least three values."""
    rows = facts.query(
        "SELECT max(reward) - min(reward), avg(reward), max(step), grp FROM rollouts "  # noqa: S608
        f"WHERE {TRAINED} AND text IS NOT NULL GROUP BY step, grp HAVING count(DISTINCT text) > 2"
    )
    if len(rows) < _MIN_GROUPS:
        return None
    equal = [row for row in rows if row[0] < _EQUAL]
    measured = f"in {len(equal)} of {len(rows)} groups of different replies all have the same reward"
    values = {round(row[1], 6) for row in equal}
    if share_interval(len(equal), len(rows), 2.0)[0] < _NEARLY_ALL or len(values) < 3:
        return measured
    return facts.finding(
        "shared_rewards",
        f"{measured[0].upper()}{measured[1:]}, and rewards have {len(values)} values",
        "the reward does not depend on the reply, but on the task or the time: it is cached by task, or kept "
        "in an object that all rollouts share",
        "keep the state of a rollout in the rollout; cache rewards by task and reply",
        evidence=[("replies and rewards", facts.rollouts(rows[-1][2], "--group", rows[-1][3]))],
        share=len(equal) / len(rows),
    )


def grader_never_pays(facts: DiagnosisFacts) -> Finding | None:
    """Find a grader that gave 0 for many steps while other reward components varied."""
    rows = facts.query(
        "SELECT part.key, count(*), count(DISTINCT step) FROM rollouts, json_each(components) part "  # noqa: S608
        f"WHERE {TRAINED} AND step > ? AND part.key LIKE 'grade/%' GROUP BY env, part.key "
        "HAVING max(abs(part.value)) = 0 AND max(reward) > min(reward)",
        facts.last - 3 * RECENT,
    )
    unpaid = [row for row in rows if row[1] >= 100 and row[2] >= 3]
    if not unpaid:
        return None
    name, count, steps = max(unpaid, key=lambda row: row[1])
    return facts.finding(
        "grader_never_pays",
        f"{name} gave 0 to all {count} rollouts of the last {steps} steps",
        "no rollout solves the task, so only other reward components are learned (the format, for example)",
        "fine-tune first on rollouts that solve it (`buckeye env play --save FILE --min-reward X`, `sft`), "
        "use easier tasks, or fix the grader if it is wrong",
        evidence=[(f"the explanations of {name}", facts.rollouts(facts.last))],
    )


def reward_sign(facts: DiagnosisFacts) -> Finding | str | None:
    """Find a reward that falls when a score among its components, or the evaluation, rises."""
    pairs = defaultdict[str, list[tuple[float, float, int]]](list)
    for reward, components, step, group in facts.query(
        f"SELECT reward, components, step, grp FROM rollouts WHERE {TRAINED} ORDER BY step DESC LIMIT 4000"  # noqa: S608
    ):
        for name, value in json.loads(components or "{}").items():
            if _SCORE.search(name) and math.isfinite(value):
                pairs[name].append((reward, value, step * 1_000_003 + group))
    measured = list[str]()
    for name, rows in pairs.items():
        value = _correlation_in_groups(np.array(rows, float))
        if value is None:
            continue
        measured.append(f"the reward correlates {value:+.2f} with `{name}`")
        if value > -0.5:
            continue
        return facts.finding(
            "reward_sign",
            f"Within groups {measured[-1]}",
            "the better reply gets the lower reward: the reward has the wrong sign",
            "turn the sign of the reward, or of this term of it",
            evidence=[("rewards and components", facts.rollouts(facts.last, "--json"))],
            correlation=value,
        )
    return _against_evaluation(facts) or _only_negative(facts) or ("; ".join(measured) if measured else None)


def _only_negative(facts: DiagnosisFacts) -> Finding | None:
    """Return a `possible` finding if no reward is above 0."""
    ((low, high),) = facts.query(f"SELECT min(reward), max(reward) FROM rollouts WHERE {TRAINED}")  # noqa: S608
    if low is None or high > 0.0 or low >= 0.0:
        return None
    return facts.finding(
        "reward_sign",
        f"All rewards are between {low:g} and {high:g}",
        "the reward only punishes, so doing nothing may be best; or it has the wrong sign",
        "check that a good reply gets more than a bad one (`buckeye env play`)",
        evidence=[("replies and rewards", facts.rollouts(facts.last))],
        confidence="possible",
    )


def _correlation_in_groups(rows: Array) -> float | None:
    """Return the correlation of the first two columns, centered by the third; None if one is constant."""
    _, places = np.unique(rows[:, 2], return_inverse=True)
    counts = np.bincount(places)
    first, second = (column - (np.bincount(places, column) / counts)[places] for column in rows[:, :2].T)
    if len(rows) < 40 or min(first.std(), second.std()) < _EQUAL:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _against_evaluation(facts: DiagnosisFacts) -> Finding | None:
    """Return a finding if the evaluation falls while the training reward rises."""
    rows = facts.query(
        "SELECT step, reward FROM rollouts WHERE split = 'eval' AND reward IS NOT NULL AND step <= {until}"
    )
    steps = sorted({step for step, _ in rows})
    if len(steps) < 2 or not facts.has_risen:
        return None
    first, last = ([reward for step, reward in rows if step == at] for at in (steps[0], steps[-1]))
    if min(len(first), len(last)) < _MIN_PAIRS or not is_below(last, first, 3.0):
        return None
    return facts.finding(
        "reward_sign",
        f"The training reward rises, and the evaluation falls from {np.mean(first):.2f} to "
        f"{np.mean(last):.2f}",
        "training rewards the opposite of what the evaluation measures: the reward has the wrong sign, or a "
        "term of it works against the goal",
        "compare the scores of training and evaluation on one reply",
        evidence=[("training and evaluation by step", facts.metrics("reward/mean", 'eval/[^"]*'))],
        first=float(np.mean(first)),
        last=float(np.mean(last)),
    )


def rare_rewards(facts: DiagnosisFacts) -> Finding | str | None:
    """Find groups too small for rewards that are rare.

    Nothing is measured if the rollouts themselves are equal. With a share p of rewarded rollouts, a group of
    n has spread with probability 1 - p^n - (1 - p)^n.
    """
    batches = [step for step in facts.batch_steps if step.value("orchestrator/batch/with_spread") is not None]
    alike = [step.value("orchestrator/batch/alike") or 0.0 for step in batches]
    if len(batches) < 3 or np.mean(alike) > _MOST_ALIKE:
        return None
    groups = sum(step.value("orchestrator/batch/groups") or 0.0 for step in batches)
    rollouts = sum(step.value("orchestrator/batch/rollouts") or 0.0 for step in batches)
    useful = sum(
        (step.value("orchestrator/batch/with_spread") or 0.0)
        * (step.value("orchestrator/batch/groups") or 0.0)
        for step in batches
    )
    share, size = useful / max(1.0, groups), rollouts / max(1.0, groups)
    per_step = useful / len(batches)
    measured = f"{share:.1%} of the groups have differing rewards, {per_step:.1f} a step"
    rows = facts.query(
        f"SELECT avg(reward > low + 1e-6) FROM rollouts, (SELECT min(reward) low FROM rollouts "  # noqa: S608
        f"WHERE {TRAINED}) WHERE {TRAINED}"
    )
    paid = float(rows[0][0] or 0.0)
    if share >= _LEAST_SPREAD or not 0.0 < paid < 0.5 or facts.has_risen or size <= 1.0 or groups < 30:
        return f"{measured} (at least {_LEAST_SPREAD:.0%})"
    needed = math.ceil(_USEFUL_GROUPS / per_step) if per_step else math.inf
    wanted = min(128, math.ceil(math.log(0.5) / math.log1p(-min(0.5, paid))))
    return facts.finding(
        "rare_rewards",
        f"1 of {1 / paid:.0f} rollouts gets a reward, so in groups of {size:.0f} only {measured}",
        f"rewards are too rare for groups of this size: {_USEFUL_GROUPS} useful groups take {needed} steps",
        f"raise orchestrator.rollouts_per_example (with {wanted} every second group is useful), use easier "
        "tasks, or fine-tune first (sft)",
        evidence=[("the share of useful groups by step", facts.metrics("batch/with_spread"))],
        share=share,
        paid=paid,
    )


def one_environment_dominates(facts: DiagnosisFacts) -> Finding | str | None:
    """Find an environment whose rewards are so large that the others have no share of the advantages."""
    rows = facts.query(
        "SELECT env, sum(abs(advantage)), count(*), avg(reward * reward) - avg(reward) * avg(reward) "  # noqa: S608
        f"FROM rollouts WHERE {TRAINED} AND dropped IS NULL AND advantage IS NOT NULL GROUP BY env"
    )
    total, count = sum(row[1] for row in rows), sum(row[2] for row in rows)
    if len(rows) < 2 or count < 40 or total <= 0.0:
        return None
    varying = [row for row in rows if row[3] > 0.0]
    name, size, number, _ = max(rows, key=lambda row: row[1] / row[2])
    share, expected = size / total, number / count
    measured = f"`{name}` has {share:.0%} of the advantages, with {expected:.0%} of the rollouts"
    rest_per_rollout = (total - size) / max(1, count - number)
    if len(varying) < 2 or size / number < 10 * rest_per_rollout:
        return f"{measured} (at most 10 times the others' per rollout)"
    return facts.finding(
        "one_environment_dominates",
        measured,
        f"the rewards of `{name}` are much larger than those of the others, so only it is learned",
        'scale the rewards of all environments to 0 to 1, or set orchestrator.advantage.std_norm = "local"',
        evidence=[("rewards by environment", facts.metrics("reward/[a-z]+"))],
        share=share,
    )


CHECKS = (
    neighbor_reward,
    shared_rewards,
    grader_disagrees,
    grader_never_pays,
    reward_sign,
    one_environment_dominates,
    rare_rewards,
)
