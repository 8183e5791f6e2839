"""Checks of the tasks: distinct, in random order, without their answers, apart from the held-out ones."""

from __future__ import annotations

import numpy as np

from buckeye.analysis.diagnosis.facts import RECENT, TRAINED, DiagnosisFacts
from buckeye.analysis.diagnosis.prompts import prompt_features
from buckeye.analysis.diagnosis.statistics import explained_by_window, is_below, share_interval
from buckeye.monitor.finding import Finding

_EQUAL = 1e-6
_MOST_DRIFT = 0.15
_MIN_GROUPS = 24


def mixed_groups(facts: DiagnosisFacts) -> Finding | str | None:
    """Find groups whose rollouts have different prompts."""
    rows = facts.query(
        f"SELECT step, grp, count(DISTINCT prompt), count(DISTINCT task) FROM rollouts WHERE {TRAINED} "  # noqa: S608
        "AND prompt IS NOT NULL GROUP BY step, grp HAVING count(*) > 1"
    )
    mixed = [row for row in rows if row[2] > 1]
    if len(rows) < 5:
        return None
    if share_interval(len(mixed), len(rows), 2.0)[0] < 0.3:
        return f"{len(mixed)} of {len(rows)} groups have more than one prompt (at most 30 %)"
    step, group = mixed[-1][:2]
    return facts.finding(
        "mixed_groups",
        f"In {len(mixed)} of {len(rows)} groups the rollouts have different prompts",
        "rewards of different tasks are compared with each other, so advantages reward the easier task",
        "give every rollout of a task the same prompt: draw random parts from the task's id",
        evidence=[(f"the prompts of group {group}", facts.rollouts(step, "--group", group))],
        confidence="sure",
        share=len(mixed) / len(rows),
    )


def duplicate_tasks(facts: DiagnosisFacts) -> Finding | str | None:
    """Find tasks with different names, but equal prompts and equal grading."""
    rows = facts.query(
        f"SELECT count(DISTINCT task), prompt, max(step) FROM rollouts WHERE {TRAINED} "  # noqa: S608
        "AND prompt IS NOT NULL GROUP BY env, prompt"
    )
    tasks, prompts = sum(row[0] for row in rows), len(rows)
    shared = sum(row[0] for row in rows if row[0] > 1)
    if tasks < 10:
        return None
    pairs, differing = _graded_otherwise(facts)
    is_incomplete = share_interval(differing, pairs, 2.0)[0] > 0.2 and _is_single_turn(facts)
    is_shared = share_interval(shared, tasks, 2.0)[0] >= 0.3
    if not is_shared or not pairs or (differing > 0.2 * pairs and (not is_incomplete or facts.has_risen)):
        return f"{tasks} tasks with {prompts} different prompts (at most 30 % share one)"
    _, prompt, step = max(rows)
    names = [
        name for (name,) in facts.query("SELECT DISTINCT task FROM rollouts WHERE prompt = ? LIMIT 3", prompt)
    ]
    if is_incomplete:
        return facts.finding(
            "prompt_incomplete",
            f"{tasks} tasks have {prompts} different prompts, and {differing} of {pairs} replies to "
            "several of them got different rewards",
            "the prompt does not say what the task is: a part is missing, or a placeholder is not filled in",
            "read a prompt, and complete it",
            evidence=[(f"the same prompt: {', '.join(names)}", facts.rollouts(step, "--task", names[0]))],
            share=differing / pairs,
        )
    return facts.finding(
        "duplicate_tasks",
        f"{tasks} tasks have {prompts} different prompts; {shared} tasks share a prompt with another",
        "the dataset has the same task under several ids, so a batch has fewer distinct tasks than it seems",
        "remove the duplicates from the dataset",
        evidence=[(f"the same prompt: {', '.join(names)}", facts.rollouts(step, "--task", names[0]))],
        confidence="likely" if prompts <= 0.5 * tasks else "possible",
        share=shared / tasks,
    )


def _graded_otherwise(facts: DiagnosisFacts) -> tuple[int, int]:
    """Return how many replies were given to several tasks with equal prompts, and how many were graded apart.

    Such tasks differ in data that the prompt does not show.
    """
    rows = facts.query(
        "SELECT max(reward) - min(reward) FROM rollouts "  # noqa: S608
        f"WHERE {TRAINED} AND text IS NOT NULL GROUP BY env, text HAVING count(DISTINCT task) > 1"
    )
    return len(rows), sum(row[0] > _EQUAL for row in rows)


def _is_single_turn(facts: DiagnosisFacts) -> bool:
    ((most,),) = facts.query(f"SELECT max(turns) FROM rollouts WHERE {TRAINED}")  # noqa: S608
    return bool(most == 1)


def unsolved_environment(facts: DiagnosisFacts) -> Finding | str | None:
    """Find an environment that has most of the groups, and no group with differing rewards."""
    rows = facts.query(
        "SELECT env, count(*), sum(spread > 1e-6), max(step) FROM (SELECT env, step, "  # noqa: S608
        f"max(reward) - min(reward) AS spread FROM rollouts WHERE {TRAINED} GROUP BY env, step, grp) "
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
        "unsolved_environment",
        f"{measured}, and it has {groups / total:.0%} of all groups",
        f"most of the batch is spent on `{name}`, and nothing can be learned from it: its tasks are too "
        "hard, too easy, or graded wrongly",
        "lower its `ratio`, or use other tasks of it",
        evidence=[(f"rollouts of `{name}`", facts.rollouts(step))],
        share=groups / total,
    )


def drift(facts: DiagnosisFacts) -> Finding | str | None:
    """Find batches whose tasks are alike, and differ from those of other batches.

    The measured quantity is the adjusted R^2 of the prompts' features on the batches. In a random order it is
    0 on average. It is compared with shuffled orders.
    """
    steps, features = prompt_features(facts)
    if len(steps) < _MIN_GROUPS or len(set(steps)) < 4:
        return None
    share, is_significant = explained_by_window(np.array(steps), features)
    measured = f"{max(0.0, share):.2f} of the variance of the prompts lies between batches"
    if not is_significant or share < _MOST_DRIFT:
        return f"{measured} (at most {_MOST_DRIFT})"
    buffer = facts.run.setting("orchestrator.buffer.type")
    return facts.finding(
        "task_drift",
        measured,
        "the tasks come in a sorted order, so each batch trains on one kind and later ones undo it",
        "shuffle the dataset, or let the environment return its tasks in random order",
        evidence=[
            ("prompts of the first step", facts.rollouts(int(steps[0]))),
            ("prompts of the last step", facts.rollouts(int(steps[-1]))),
        ],
        confidence="likely" if buffer in (None, "simple") else "possible",
        share=share,
    )


def answer_in_prompt(facts: DiagnosisFacts) -> Finding | str | None:
    """Find higher rewards for replies that repeat text of the prompt."""
    rows = facts.query(
        f"SELECT step, grp, reward, echoes FROM rollouts WHERE {TRAINED} AND echoes IS NOT NULL"  # noqa: S608
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
    held_out = [row[0] for row in facts.query(_EVALUATED)]
    trained = [row[2] for row in rows if row[0] >= facts.last - RECENT]
    behind = len(held_out) >= 10 and is_below(held_out, trained)
    step, group = copied[-1][:2]
    return facts.finding(
        "answer_in_prompt",
        f"{measured}, word for word" + (", and held-out tasks have lower rewards" if behind else ""),
        "the prompts contain the answer, so the policy learns to copy",
        "remove the answer from the prompts; `buckeye env check` searches all tasks",
        evidence=[(f"group {group} of step {step}", facts.rollouts(step, "--group", group))],
        confidence="likely" if behind else "possible",
        share=len(copied) / len(paid),
    )


_EVALUATED = (
    "SELECT reward FROM rollouts WHERE split = 'eval' AND reward IS NOT NULL AND step = (SELECT max(step) "
    "FROM rollouts WHERE split = 'eval' AND step <= {until})"
)


def evaluated_on_train(facts: DiagnosisFacts) -> Finding | str | None:
    """Find evaluation prompts that are also training prompts."""
    known = facts.query(
        "SELECT DISTINCT split, prompt FROM rollouts WHERE retried = 0 AND prompt IS NOT NULL "
        "AND step <= {until}"
    )
    evaluated, trained = ({prompt for of, prompt in known if of == split} for split in ("eval", "train"))
    both = evaluated & trained
    if len(evaluated) < 3:
        return None
    measured = f"{len(both)} of the {len(evaluated)} evaluation prompts are also trained on"
    if share_interval(len(both), len(evaluated), 2.0)[0] < 0.2:
        return f"{measured} (at most 20 %)"
    (step, task), *_ = facts.query(
        "SELECT step, task FROM rollouts WHERE split = 'train' AND prompt = ? AND step <= {until}",
        min(both),
    )
    return facts.finding(
        "evaluated_on_train",
        measured,
        "the evaluation uses the train split, so it measures memorization",
        "set split of [[orchestrator.eval.env]] to a held-out split",
        evidence=[(f"the same prompt in training: {task}", facts.rollouts(step, "--task", task))],
        confidence="sure",
        share=len(both) / len(evaluated),
    )


CHECKS = (mixed_groups, duplicate_tasks, unsolved_environment, drift, answer_in_prompt, evaluated_on_train)
