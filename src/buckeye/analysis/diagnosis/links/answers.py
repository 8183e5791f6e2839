"""Checks of held-out tasks and answers: training has all kinds of them, and answers fit their prompts.

An answer is a reply with the highest reward.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from buckeye.analysis.diagnosis.facts import DiagnosisFacts, Result
from buckeye.analysis.diagnosis.prompts import message_text
from buckeye.analysis.diagnosis.statistics import cross_validated_fit, share_interval
from buckeye.monitor.conversation import prompt_text

_EQUAL = 1e-6
_MIN_TASKS = 10
_MIN_TRAINED = 20  # tasks
_PROMPTS = 100
_MOST_REPLIES = 1000
_MOST_WORDS = 200
_MOST_COMMON_REPLIES = 8
_NEARLY_ALL = 0.9
_FOLDS = 8
_ERRORS = 3.0
_WORD = re.compile(r"\w+")


def narrow_answers(facts: DiagnosisFacts) -> Result:
    """Find answers that recur in held-out tasks and never in training, in a run whose evaluation lags.

    Nearly all training tasks must have known answers, so that none has a missing one. Answers that recur in
    training must be in held-out tasks too, else these are another task.
    """
    if not facts.evaluation_lags:
        return None
    train, evaluated = (_answers(_replies(facts, split)) for split in ("train", "eval"))
    ((tasks,),) = facts.query("SELECT count(DISTINCT env || ':' || task) FROM rollouts WHERE {trained}")
    if min(len(train), len(evaluated)) < _MIN_TASKS or len(train) < _NEARLY_ALL * tasks:
        return None
    affected, answers = _lacking([*train.values()], [*evaluated.values()], least=0.2)
    seen = f"{affected} of {len(evaluated)} held-out tasks have a common answer that training lacks"
    return facts.finding("narrow_answers", f"{seen}: {answers}") if answers else seen


def narrow_tasks(facts: DiagnosisFacts) -> Result:
    """Find held-out tasks of kinds that training lacks, if training does not help them.

    A kind is a word without digits that a tenth of the held-out prompts have, and no training prompt has. All
    common words of the training prompts must be in held-out prompts too, else these are another task.
    """
    if not facts.evaluation_lags:
        return None
    train, evaluated = (
        [
            {word for word in prompt_text(rollout.messages).split() if not any(map(str.isdigit, word))}
            for rollout in facts.first_rollouts(split, _PROMPTS)
        ]
        for split in ("train", "eval")
    )
    if min(len(train), len(evaluated)) < _MIN_TASKS:
        return None
    affected, words = _lacking(train, evaluated, least=0.3)
    seen = f"{affected} of {len(evaluated)} held-out prompts have a common word that training lacks"
    return facts.finding("narrow_tasks", f"{seen}: {words}") if words else seen


def _lacking(train: Sequence[set[str]], evaluated: Sequence[set[str]], *, least: float) -> tuple[int, str]:
    """Return how many held-out tasks have items that recur in them and that training lacks, and these items.

    The items are "" if the share of these tasks may be below `least`, or if training has common items that
    held-out tasks lack: these are another task.
    """
    missing, other = (
        {one for one, count in Counter(chain(*ours)).items() if count >= 0.1 * len(ours)}.difference(*theirs)
        for ours, theirs in ((evaluated, train), (train, evaluated))
    )
    affected = sum(bool(items & missing) for items in evaluated)
    is_significant = not other and share_interval(affected, len(evaluated), 2.0)[0] >= least
    return affected, ", ".join(repr(one[:40]) for one in sorted(missing)[:5]) if is_significant else ""


def unrelated_answers(facts: DiagnosisFacts) -> Result:
    """Find rewards that depend on words of the prompt in evaluations, but not in training, if it is flat.

    The dependence is the correlation of the rewards of common replies with their prediction from the words,
    cross-validated over tasks. This is evidence only if no other link is broken.
    """
    if not facts.is_flat() or facts.evaluates_other_tasks:
        return None
    train, evaluated = (_replies(facts, split) for split in ("train", "eval"))
    counts = Counter(chain.from_iterable(train.words.values()))
    limits = 0.02 * len(train.words), 0.98 * len(train.words)
    words = [word for word, count in counts.most_common() if limits[0] < count < limits[1]][:_MOST_WORDS]
    common = sorted(
        (
            reply
            for reply, rewards in train.rewards.items()
            if len(rewards) >= _MIN_TRAINED and len(evaluated.rewards.get(reply, ())) >= _MIN_TASKS
        ),
        key=lambda reply: -len(train.rewards[reply]),
    )[:_MOST_COMMON_REPLIES]
    if not common or not words:
        return None
    (ours, most), (theirs, least) = (
        _word_dependence(found, common, words, sign) for found, sign in ((train, 1), (evaluated, -1))
    )
    if ours is None or theirs is None or least < most:
        return None
    return facts.finding(
        "unrelated_answers",
        f"the words of prompts predict the rewards of {len(common)} common replies in evaluations "
        f"(correlation {theirs:.2f}), and not in training ({ours:.2f})",
    )


@dataclass(frozen=True)
class _Replies:
    """First rewards by reply and task, the highest reward, and the words of the prompt by task."""

    rewards: dict[str, dict[str, float]] = field(default_factory=dict)
    words: dict[str, set[str]] = field(default_factory=dict)


def _replies(facts: DiagnosisFacts, split: str) -> _Replies:
    where = (
        "split = ? AND retried = 0 AND reward IS NOT NULL AND step <= {until} "
        "GROUP BY env, task, text ORDER BY count(*) DESC LIMIT ?"
    )
    found, columns = _Replies(), "env || ':' || task, reward, min(step)"
    for rollout, (task, reward, _) in facts.rollouts(where, split, _MOST_REPLIES, columns=columns):
        if rollout.messages:
            reply = message_text(rollout.messages[-1]).strip()
            found.rewards.setdefault(reply, {}).setdefault(task, reward)
            found.words.setdefault(task, set(_WORD.findall(prompt_text(rollout.messages).lower())))
    return found


def _answers(found: _Replies) -> dict[str, set[str]]:
    """Return the replies with the highest reward of all tasks, by task."""
    best = max((max(rewards.values()) for rewards in found.rewards.values()), default=0.0)
    answers = defaultdict[str, set[str]](set)
    for reply, rewards in found.rewards.items():
        for task, reward in rewards.items():
            if reward >= best - _EQUAL:
                answers[task].add(reply)
    return answers


def _word_dependence(
    found: _Replies, replies: list[str], words: list[str], sign: int
) -> tuple[float | None, float]:
    """Return the correlation of rewards with their prediction from words, and its upper or lower bound.

    `sign` is 1 for the upper bound, -1 for the lower one (Fisher's z). None if the rewards are constant.
    """
    rows, values, folds = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    numbers = {task: at for at, task in enumerate(found.words)}
    for at, reply in enumerate(replies):
        rewards = found.rewards[reply]
        has_word = np.array([[word in found.words[task] for word in words] for task in rewards], float)
        features = np.zeros((len(rewards), len(replies), len(words)))
        features[:, at] = has_word - has_word.mean(0)
        relative = np.array(list(rewards.values()))
        rows.append(features.reshape(len(rewards), -1))
        values.append(relative - relative.mean())
        folds.append(np.array([numbers[task] % _FOLDS for task in rewards]))
    targets, tasks = np.concatenate(values), {task for reply in replies for task in found.rewards[reply]}
    if targets.std() < _EQUAL:
        return None, 0.0
    fit = cross_validated_fit(np.concatenate(rows), targets, np.concatenate(folds))
    return fit, math.tanh(math.atanh(min(fit, 0.999)) + sign * _ERRORS / math.sqrt(max(1, len(tasks) - 3)))
