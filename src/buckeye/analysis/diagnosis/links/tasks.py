"""Checks of the tasks: distinct, in random order, without their answers, apart from the held-out ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from buckeye.analysis.diagnosis.facts import LONG, RECENT, DiagnosisFacts, Result
from buckeye.analysis.diagnosis.links.answers import narrow_tasks
from buckeye.analysis.diagnosis.prompts import continuations, cut_texts, message_text, token_features
from buckeye.analysis.diagnosis.statistics import centered, explained_by_window, is_below, share_interval
from buckeye.base.columns import counted
from buckeye.monitor.conversation import prompt_text
from buckeye.monitor.rollouts import RecordedRollout

_EQUAL = 1e-6
_MOST_DRIFT = 0.15
_MIN_GROUPS = 24
_MOST_GROUPS = 300
_MIN_PROMPTS = 10
_PROMPTS = 100
_MOST_REPEATS = 20
_NEARLY_ALL = 0.9
_MIN_EQUAL = 3
_COMPARED_PROMPTS = 40
_COMPARED_ROLLOUTS = 16


def mixed_groups(facts: DiagnosisFacts) -> Result:
    """Find groups whose rollouts have different prompts."""
    rows = facts.query(
        "SELECT step, grp, count(DISTINCT prompt) FROM rollouts WHERE {trained} AND prompt IS NOT NULL "
        "GROUP BY step, grp HAVING count(*) > 1 ORDER BY step DESC"
    )
    mixed = [row[:2] for row in rows if row[2] > 1]
    what = "groups have more than one prompt"
    return facts.share_finding("mixed_groups", mixed, len(rows), what, most=0.3, least=5, confidence="sure")


def duplicate_tasks(facts: DiagnosisFacts) -> Result:
    """Find tasks with different names, but equal prompts and equal grading."""
    rows = facts.query(
        "SELECT count(DISTINCT task), max(step), min(task), max(turns) FROM rollouts WHERE {trained} "
        "AND prompt IS NOT NULL GROUP BY env, prompt ORDER BY 1 DESC"
    )
    tasks, prompts = sum(row[0] for row in rows), len(rows)
    shared = sum(row[0] for row in rows if row[0] > 1)
    if tasks < 10:
        return None
    spreads = facts.query(
        "SELECT max(reward) - min(reward) FROM rollouts WHERE {trained} AND text IS NOT NULL "
        "GROUP BY env, text HAVING count(DISTINCT task) > 1"
    )
    pairs, differing = len(spreads), sum(row[0] > _EQUAL for row in spreads)
    is_single_turn = all(row[3] == 1 for row in rows)
    if not is_single_turn:  # later turns may show what distinguishes the tasks
        return f"{counted(tasks, 'task')} with {counted(prompts, 'different first prompt')}"
    is_incomplete = share_interval(differing, pairs, 2.0)[0] > 0.2
    is_shared = share_interval(shared, tasks, 2.0)[0] >= 0.3
    if not is_shared or not pairs or (differing > 0.2 * pairs and (not is_incomplete or facts.has_risen)):
        return f"{counted(tasks, 'task')} with {counted(prompts, 'distinct prompt')} (at most 30 % share one)"
    seen, (_, step, task, _) = f"{tasks} tasks have {counted(prompts, 'distinct prompt')}", rows[0]
    if is_incomplete:
        seen += f", and {differing} of {pairs} replies to several of them got different rewards"
        return facts.finding("prompt_incomplete", seen, step, task=task)
    seen += f"; {shared} tasks share a prompt with another"
    is_harmful = prompts <= 0.5 * tasks and (facts.is_memorizing or not facts.evaluations)
    return facts.finding(
        "duplicate_tasks", seen, step, task=task, confidence="likely" if is_harmful else "possible"
    )


def unsolved_environment(facts: DiagnosisFacts) -> Result:
    """Find an environment that has most of the groups, and no group with differing rewards."""
    rows = facts.query(
        "SELECT env, count(*), sum(spread > 1e-6), max(step) FROM (SELECT env, step, "
        "max(reward) - min(reward) AS spread FROM rollouts WHERE {trained} GROUP BY env, step, grp) "
        "GROUP BY env"
    )
    total = sum(row[1] for row in rows)
    if len(rows) < 2 or total < _MIN_GROUPS:
        return None
    name, groups, useful, step = max(rows, key=lambda row: row[1] - row[2])
    measured = f"{useful} of {groups} groups of `{name}` have differing rewards"
    if useful or groups < max(_MIN_GROUPS, 0.5 * total):
        return measured
    return facts.finding(
        "unsolved_environment", f"{measured}, and it has {groups / total:.0%} of all groups", step
    )


def drift(facts: DiagnosisFacts) -> Result:
    """Find batches whose tasks are alike, and differ from those of other batches.

    The measured quantity is the adjusted R^2 of the characters of the prompts on the batches. In a random
    order it is 0 on average. It is compared with shuffled orders. Groups that are not trained count too,
    because the choice of trained groups changes while the policy learns. Groups count in the order of their
    start, and each environment is measured apart, because short rollouts end, and are trained, first.
    """
    rows = facts.query(
        "SELECT step, path, at, bytes, grp, number, env, min(number) FROM rollouts WHERE {trained} "
        "AND prompt IS NOT NULL GROUP BY step, grp ORDER BY grp, step"
    )
    rows = rows[:: max(1, len(rows) // _MOST_GROUPS)]
    rollouts = [facts.run.text_at(*row[1:6]) for row in rows]
    known = [
        (row[0], row[6], prompt_text(one.messages))
        for row, one in zip(rows, rollouts, strict=True)
        if one is not None
    ]
    steps, envs, prompts = zip(*known, strict=True) if known else ((), (), ())
    steps = tuple(sorted(steps))
    if len(steps) < _MIN_GROUPS or len(set(steps)) < 4:
        return None
    texts = [np.frombuffer(prompt.encode(errors="replace"), np.uint8) for prompt in prompts]
    features = np.array([token_features(text.astype(np.int32)) for text in texts])
    relative = [centered(column, np.array(envs)) for column in features.T]
    share, is_significant = explained_by_window(np.array(steps), np.stack(relative, axis=1))
    measured = f"{max(0.0, share):.2f} of the variance of the prompts lies between batches"
    if not is_significant or share < _MOST_DRIFT:
        return f"{measured} (at most {_MOST_DRIFT})"
    is_in_order = facts.run.setting("orchestrator.buffer.type") in (None, "simple")
    return facts.finding("task_drift", measured, steps[0], confidence="likely" if is_in_order else "possible")


def answer_in_prompt(facts: DiagnosisFacts) -> Result:
    """Find higher rewards for replies that repeat text of the prompt."""
    rows = facts.query(
        "SELECT step, grp, reward, echoes FROM rollouts WHERE {trained} AND echoes IS NOT NULL"
    )
    said, other = ([row[2] for row in rows if row[3] == kind] for kind in (1, 0))
    if len(rows) < 20:
        return None
    best = max(row[2] for row in rows)
    paid = [row for row in rows if row[2] >= best - _EQUAL]
    copied = [row for row in paid if row[3]]
    measured = f"{len(copied)} of the {len(paid)} answers with the highest reward are in their prompts"
    unusual = len(said) >= 20 and (is_below(other, said) or not other)
    if not unusual or share_interval(len(copied), len(paid), 2.0)[0] < 0.7:
        return f"{measured} (at most 70 %)"
    if _are_options(facts, best):
        return f"{measured}, as options that nearly all prompts have"
    held_out = facts.evaluations[-1] if facts.evaluations else []
    trained = [row[2] for row in rows if row[0] >= facts.last - RECENT]
    behind = len(held_out) >= 10 and is_below(held_out, trained)
    apart = _evaluations_hide_answers(facts)
    seen = f"{measured}, word for word" + (", and held-out tasks have lower rewards" if behind else "")
    seen += ", and those of evaluations are not" if apart else ""
    return facts.finding(
        "answer_in_prompt", seen, *copied[-1][:2], confidence="likely" if behind or apart else "possible"
    )


def _are_options(facts: DiagnosisFacts, best: float) -> bool:
    """Return True if the answers with the highest reward are several, and nearly all prompts have them."""
    where = "{trained} AND echoes = 1 AND reward >= ? ORDER BY step, grp, number LIMIT ?"
    rollouts = facts.rollouts(where, best - _EQUAL, _PROMPTS)
    answers = {str(one.messages[-1].get("content")).strip() for one, _ in rollouts if one.messages}
    prompts = [prompt_text(rollout.messages) for rollout in facts.first_rollouts("train", _PROMPTS)]
    contained = [answer in prompt for answer in answers for prompt in prompts]
    return len(answers) > 1 and len(prompts) > 1 and float(np.mean(contained)) > _NEARLY_ALL


def _evaluations_hide_answers(facts: DiagnosisFacts) -> bool:
    """Return True if few of the evaluation's answers with the highest reward are in their prompts."""
    rows = facts.query("SELECT reward, echoes FROM rollouts WHERE {evaluated} AND echoes IS NOT NULL")
    best = max((reward for reward, _ in rows), default=0.0)
    paid = [echoes for reward, echoes in rows if reward >= best - _EQUAL]
    return len(paid) >= _MIN_PROMPTS and share_interval(sum(paid), len(paid), 2.0)[1] < 0.5


def evaluated_on_train(facts: DiagnosisFacts) -> Result:
    """Find evaluation prompts that are also training prompts.

    Tasks of several turns may have equal first prompts and differ later. They are the same tasks if their
    names are equal, or if equal messages lead to the same observations and rewards.
    """
    query = (
        "SELECT prompt, max(step), task, max(turns) FROM rollouts WHERE split = ? AND retried = 0 "
        "AND prompt IS NOT NULL AND step <= {until} GROUP BY prompt "
        "HAVING max(turns) = 1 OR count(DISTINCT task) = 1"
    )
    trained, evaluated = (
        {prompt: row for prompt, *row in facts.query(query, split)} for split in ("train", "eval")
    )
    both = [prompt for prompt in evaluated if prompt in trained]
    ((tasks,),) = facts.query("SELECT count(DISTINCT task) FROM rollouts WHERE {trained}")
    is_certain = len(trained) > 0.5 * tasks  # else the environment has few prompts
    what = "evaluation prompts are also trained on"
    longer = [prompt for prompt in both if max(trained[prompt][2], evaluated[prompt][2]) > 1]
    if len(longer) > 0.5 * len(both):
        equal, differing, is_telling = _compare_splits(facts, longer)
        if share_interval(differing, equal + differing, 2.0)[0] > 0.1:
            return (
                f"{len(both)} of {len(evaluated)} evaluations begin with a prompt of training, and "
                f"{differing} of {equal + differing} of them continue otherwise"
            )
        named_alike = sum(trained[prompt][1] == evaluated[prompt][1] for prompt in longer)
        is_certain &= named_alike > 0.5 * len(longer) or (equal >= _MIN_EQUAL and is_telling)
    return facts.share_finding(
        "evaluated_on_train",
        [(trained[prompt][0],) for prompt in both],
        len(evaluated),
        what,
        most=0.2,
        least=3,
        confidence="sure" if is_certain else "possible",
        task=trained[both[0]][1] if both else "",
    )


def _compare_splits(facts: DiagnosisFacts, prompts: Sequence[int]) -> tuple[int, int, bool]:
    """Compare what followed equal messages in training and in evaluations: observations and the reward.

    Return the number of prompts with only equal continuations, and with others; and True if continuations
    differ between prompts, so that equal ones are evidence.
    """
    where = (
        "split = ? AND retried = 0 AND reward IS NOT NULL AND prompt = ? AND step <= {until} "
        "ORDER BY step LIMIT ?"
    )
    equal, differing, outcomes = 0, 0, set[frozenset[str]]()
    for prompt in prompts[:_COMPARED_PROMPTS]:
        trained, evaluated = (
            _continued(rollout for rollout, _ in facts.rollouts(where, split, prompt, _COMPARED_ROLLOUTS))
            for split in ("train", "eval")
        )
        shared = trained.keys() & evaluated.keys()
        if shared:
            is_other = any(trained[before].isdisjoint(evaluated[before]) for before in shared)
            equal, differing = equal + (not is_other), differing + is_other
            outcomes.add(frozenset[str]().union(*(trained[before] for before in shared)))
    return equal, differing, len(outcomes) > 1


def _continued(rollouts: Iterable[RecordedRollout]) -> dict[tuple[str, ...], set[str]]:
    """Return the observations, and at the end the rewards, after the contents of all messages before."""
    found = defaultdict[tuple[str, ...], set[str]](set)
    for rollout in rollouts:
        for before, observation in continuations(rollout):
            found[before].add(observation)
        found[tuple(map(message_text, rollout.messages))].add(f"{rollout.reward:.6g}")
    return found


def cut_prompts(facts: DiagnosisFacts) -> Result:
    """Find prompts that all have the same length and end within a word: a limit has cut them."""
    texts = [prompt_text(rollout.messages) for rollout in facts.first_rollouts("train", _PROMPTS)]
    if len(texts) < _MIN_PROMPTS:
        return None
    cut = cut_texts(texts)
    if cut is None or share_interval(cut[0], len(texts), 2.0)[0] < 0.5:
        return None
    count, longest, words = cut
    measured = f"{count} of {len(texts)} prompts end with a letter after {longest} characters"
    return facts.finding("cut_prompts", f"{measured}, with the parts of words {words[:3]}", facts.early)


def few_tasks(facts: DiagnosisFacts) -> Result:
    """Find tasks that are trained many times each, in a run whose evaluation lags."""
    ((groups, tasks),) = facts.query(
        "SELECT count(DISTINCT grp), count(DISTINCT env || task) FROM rollouts WHERE {trained}"
    )
    if not tasks:
        return None
    measured = f"{counted(tasks, 'task')}, each trained {groups / tasks:.1f} times"
    if not facts.is_memorizing or groups < _MOST_REPEATS * tasks:
        return measured
    return facts.finding("few_tasks", f"{measured}, and the evaluation does not follow")


def incomplete_prompts(facts: DiagnosisFacts) -> Result:
    """Find few prompts for many tasks of one turn, in a run that does not learn.

    This is evidence only if no other link is broken, so it is not in `CHECKS`.
    """
    if not facts.is_flat():
        return None
    ((tasks, prompts, turns, task),) = facts.query(
        "SELECT count(DISTINCT env || task), count(DISTINCT env || prompt), max(turns), min(task) "
        "FROM rollouts WHERE {trained} AND prompt IS NOT NULL"
    )
    if turns != 1 or prompts > 0.5 * tasks:
        return None
    seen = f"{tasks} tasks have {counted(prompts, 'distinct prompt')}, and the reward does not rise"
    return facts.finding("prompt_incomplete", seen, facts.early, task=task)


def unused_prompts(facts: DiagnosisFacts) -> Result:
    """Find replies that do not depend on their prompts though rewards do, in a long run without a gain.

    The dependence is the adjusted R^2 of the features of replies, centered by step, on their groups. Noisy
    rewards prove nothing. Others are evidence only if no other link is broken, so this is not in `CHECKS`.
    """
    spread = facts.values("orchestrator/batch/with_spread").values()
    if not facts.is_flat(LONG) or np.mean([*spread]) < 0.3:
        return None
    steps, groups, features = list[int](), list[int](), list[npt.NDArray[np.float64]]()
    rewards, is_repeated = defaultdict[bytes, dict[str, float]](dict), list[bool]()
    for (step, group, _), sample, (reward, task) in facts.samples("reward, task"):
        if sample.loss_mask.any():
            reply = sample.token_ids[sample.loss_mask]
            known = rewards[reply.tobytes()]
            if task in known:
                is_repeated.append(abs(known[task] - reward) <= _EQUAL)
            known.setdefault(task, reward)
            steps.append(step)
            groups.append(group)
            features.append(token_features(reply))
    spreads = [max(known.values()) - min(known.values()) for known in rewards.values() if len(known) > 1]
    is_noisy = bool(is_repeated) and float(np.mean(is_repeated)) < _NEARLY_ALL
    if len(set(groups)) < _MIN_GROUPS or len(spreads) < _MIN_PROMPTS or is_noisy:
        return None
    columns = [centered(column, np.array(steps)) for column in np.array(features).T]
    share, depends = explained_by_window(np.array(groups), np.stack(columns, axis=1))
    differing = sum(spread > _EQUAL for spread in spreads)
    if depends or share_interval(differing, len(spreads), 2.0)[0] < 0.3:
        return None
    return facts.finding(
        "unused_prompts",
        f"{max(0.0, share):.2f} of the variance of the replies lies between prompts, and {differing} of "
        f"{len(spreads)} replies to several tasks got different rewards",
    )


CHECKS = (
    mixed_groups,
    cut_prompts,
    narrow_tasks,
    few_tasks,
    duplicate_tasks,
    unsolved_environment,
    drift,
    answer_in_prompt,
    evaluated_on_train,
)
