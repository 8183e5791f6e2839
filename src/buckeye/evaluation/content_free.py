"""Scores of content-free policies, which ignore the question: a baseline for the rewards of a model.

A content-free policy replies with nothing, a constant string, the prompt, a part of the prompt (a quotation,
a number, the last part, its quoted words shuffled), all short words, a random word, or the answer of another
task. A reply form is the bare reply, or the reply in an answer format of the prompts, such as `<answer>`
tags. Each policy uses every reply form.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from buckeye.envs.base import Environment, Probe, Task
from buckeye.evaluation.checks.constants import SELECTION_TASKS, choose_constants, common_words
from buckeye.evaluation.checks.samples import SplitSample, family_of, groups_of
from buckeye.evaluation.checks.scripted_runner import ScriptedRollout, ScriptedRunner
from buckeye.evaluation.checks.task_text import (
    accepted_answers,
    answer_formats,
    apply_format,
    numbers_of,
    prompt_of,
    question_of,
    quotations_of,
)
from buckeye.monitor.intervals import is_pass

CONSTANT_REPLY = "one string always"
_SHORT_WORD_LENGTH = 4
_DUMPED_WORDS = 100
_FORMATS_READ = 500

Answer = Callable[[Task], str]
"""Function that returns the reply of a policy to a task, before formatting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContentFreeScore:
    """Score of one policy on the sampled tasks of one family and split, with its best reply form.

    `scored` counts the tasks without an error. `mean` is their mean reward, and `exact` the share of them
    with reward >= 1; both are NaN if `scored` is 0. `best` is the rollout with the highest reward, or None.
    `forms` has the rewards of every reply form.
    """

    split: str
    family: str
    policy: str
    scored: int
    errored: int
    mean: float
    exact: float
    best: ScriptedRollout | None
    forms: Sequence[Sequence[float]]

    @property
    def group(self) -> tuple[str, str]:
        """Split and family of the tasks."""
        return self.split, self.family


@dataclass(frozen=True, slots=True)
class ContentFreePolicies:
    """Content-free policies of one environment.

    The data of the policies come from the train split. Without a train split, only `formats` and the lexicon
    of the environment are set. `chosen_on` has the ids of the train tasks that chose the constants. Constants
    are not scored on these tasks.
    """

    formats: Sequence[str | None]
    constants: Mapping[str, Sequence[str]]
    any_constant: Sequence[str]
    chosen_on: Collection[str]
    dumps: Mapping[str, str]
    any_dump: str
    lexicon: Sequence[str]
    seed: int

    def replies(self, family: str, tasks: Sequence[Task]) -> dict[str, list[Answer]]:
        """Return, by policy name, the possible replies to tasks of a family, as functions of the task.

        The most informative policies are first, because the deadline may end the check.
        """
        answers: dict[str, Answer] = {"nothing": lambda _: "", "the prompt again": question_of}
        others = [(task.id, answer) for task in tasks for answer in accepted_answers(task)[:1]]
        if len(others) > 1:
            answers["another task's answer"] = lambda task: self._other(task, others)
        answers |= {
            "its first quotation": lambda task: _at(quotations_of(task), 0),
            "its last quotation": lambda task: _at(quotations_of(task), -1),
            "its last part": lambda task: question_of(task).rpartition(":")[2].strip(),
            "its first number": lambda task: _at(_numbers(task), 0),
            "its last number": lambda task: _at(_numbers(task), -1),
            "all short words": lambda _: self.dumps.get(family, self.any_dump),
            "its quoted words, shuffled": self._shuffled,
            "a random word": self._random_word,
        }
        constants = dict.fromkeys([*self.constants.get(family, ()), *self.any_constant])
        return {
            **({CONSTANT_REPLY: [_always(reply) for reply in constants]} if constants else {}),
            **{name: [_formatted(f, answer) for f in self.formats] for name, answer in answers.items()},
        }

    def _shuffled(self, task: Task) -> str:
        words = " ".join(quotations_of(task)).split()
        self._rng(task).shuffle(words)
        return " ".join(words)

    def _random_word(self, task: Task) -> str:
        return self._rng(task).choice(self.lexicon) if self.lexicon else ""

    def _other(self, task: Task, others: Sequence[tuple[str, str]]) -> str:
        index = self._rng(task).randrange(len(others))
        if others[index][0] == task.id:
            index -= 1
        return others[index][1]

    def _rng(self, task: Task) -> random.Random:
        return random.Random(f"{self.seed}/{task.id}")  # noqa: S311  not for security


def content_free_policies(
    environment: Environment, sample: SplitSample, *, probes: Sequence[Probe] = (), seed: int = 0
) -> ContentFreePolicies:
    """Make the policies from train tasks and the answer formats of the probes.

    `choose_constant_replies` adds the constants later. Without a train split, `sample` is a held-out split,
    and only its answer formats are used.
    """
    shown = [prompt_of(task) for task in sample.scanned[:_FORMATS_READ]]
    families = sample.families if sample.is_train else {}
    every = [task for tasks in families.values() for task in tasks]
    lexicon = getattr(environment, "lexicon", None)
    return ContentFreePolicies(
        formats=[None, *answer_formats([*shown, *(probe.reply for probe in probes)])],
        constants={},
        any_constant=(),
        chosen_on=(),
        dumps={family: _dump(tasks) for family, tasks in families.items()},
        any_dump=_dump(every),
        lexicon=list(lexicon()) if lexicon else common_words(map(prompt_of, every), 2_000),
        seed=seed,
    )


async def choose_constant_replies(
    runner: ScriptedRunner, policies: ContentFreePolicies, sample: SplitSample
) -> ContentFreePolicies:
    """Return the policies with the constant replies that have the highest reward on some train tasks.

    Constants are not scored on the tasks that choose them.
    """
    if not sample.is_train:
        return policies
    chosen_on = {
        family: tasks[: min(SELECTION_TASKS, len(tasks) // 2)] for family, tasks in sample.families.items()
    }
    measured = {
        task.id for family, tasks in sample.families.items() for task in tasks[len(chosen_on[family]) :]
    }
    known = [task for task in sample.scanned if task.id not in measured]

    async def best(tasks: Sequence[Task], known: Sequence[Task]) -> list[str]:
        return await choose_constants(runner, tasks, known, policies.formats, policies.seed)

    constants = {
        family: await best(tasks, [task for task in known if family_of(task) == family])
        for family, tasks in chosen_on.items()
    }
    any_constant = [reply for replies in constants.values() for reply in replies]
    if len(constants) > 1:
        every = [task for tasks in chosen_on.values() for task in tasks]
        count = min(len(every), SELECTION_TASKS)
        any_constant = await best(random.Random(f"{policies.seed}/mixed").sample(every, count), known)  # noqa: S311  not for security
    return replace(
        policies,
        constants=constants,
        any_constant=any_constant,
        chosen_on={task.id for tasks in chosen_on.values() for task in tasks},
    )


async def score_content_free(
    runner: ScriptedRunner,
    policies: ContentFreePolicies,
    samples: Sequence[SplitSample],
    *,
    only: Collection[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[ContentFreeScore]:
    """Return the score of every policy, or of those in `only`, on every family and split.

    The score of a policy is the mean reward of its best reply form. All policies run on a few tasks first,
    then on more, so that every policy has results at the deadline.
    """
    cells = [
        _PolicyResults(split, family, name, _scored_tasks(policies, name, tasks), forms)
        for split, family, tasks in groups_of(samples)
        for name, forms in policies.replies(family, tasks).items()
        if not only or name in only
    ]
    total, start = max((len(cell.tasks) for cell in cells), default=0), 0
    while start < total:
        end = 2 * start + 1
        progress(f"content-free policies on {min(end, total)} of {total} tasks")
        await _run_more(runner, cells, start, end)
        start = end
    return [cell.score() for cell in cells]


def _scored_tasks(policies: ContentFreePolicies, name: str, tasks: Sequence[Task]) -> list[Task]:
    return [task for task in tasks if name != CONSTANT_REPLY or task.id not in policies.chosen_on]


@dataclass(slots=True)
class _PolicyResults:
    """Finished rollouts of one policy on one family and split, by index of the reply form."""

    split: str
    family: str
    policy: str
    tasks: Sequence[Task]
    forms: Sequence[Answer]
    rollouts: dict[int, list[ScriptedRollout]] = field(default_factory=dict)

    def score(self) -> ContentFreeScore:
        scores = [self._score(self.rollouts.get(number, [])) for number in range(len(self.forms))]
        best = max(scores, key=lambda score: (not math.isnan(score.mean), score.mean))
        return replace(best, forms=[rewards for score in scores for rewards in score.forms])

    def _score(self, rollouts: Sequence[ScriptedRollout]) -> ContentFreeScore:
        rewards = [p.reward for p in rollouts if math.isfinite(p.reward)]
        return ContentFreeScore(
            split=self.split,
            family=self.family,
            policy=self.policy,
            scored=len(rewards),
            errored=sum(p.outcome.error is not None for p in rollouts),
            mean=math.fsum(rewards) / len(rewards) if rewards else math.nan,
            exact=sum(map(is_pass, rewards)) / len(rewards) if rewards else math.nan,
            best=max(rollouts, key=lambda p: (math.isfinite(p.reward), p.reward), default=None),
            forms=[rewards],
        )


async def _run_more(runner: ScriptedRunner, cells: Sequence[_PolicyResults], start: int, end: int) -> None:
    """Run all policies on their tasks from `start` to `end`. Equal replies to a task share one rollout."""
    replies = [
        (cell, number, task, reply(task))
        for cell in cells
        for task in cell.tasks[start:end]
        for number, reply in enumerate(cell.forms)
    ]
    distinct = list({(task.id, reply): (task, reply) for _, _, task, reply in replies}.values())
    results = await runner.run_all(distinct)
    by_reply = {(task.id, reply): rollout for (task, reply), rollout in zip(distinct, results, strict=True)}
    for cell, number, task, reply in replies:
        rollout = by_reply[task.id, reply]
        if rollout is not None:
            cell.rollouts.setdefault(number, []).append(rollout)


def _formatted(pattern: str | None, answer: Answer) -> Answer:
    return lambda task: apply_format(pattern, answer(task))


def _always(reply: str) -> Answer:
    return lambda _: reply


def _at(texts: Sequence[str], index: int) -> str:
    return texts[index] if texts else ""


def _numbers(task: Task) -> list[str]:
    written = (f"{number:f}" for number in numbers_of(question_of(task)))
    return [text.rstrip("0").rstrip(".") if "." in text else text for text in written]


def _dump(tasks: Sequence[Task]) -> str:
    """Return the most frequent short words of the prompts and answers, as one reply."""
    texts = [text for task in tasks for text in (*accepted_answers(task), prompt_of(task))]
    return " ".join(common_words(texts, _DUMPED_WORDS, longest=_SHORT_WORD_LENGTH))
