"""What a policy without any content earns: the floor that every score and curve has to be read against.

Such a policy never looks at what is asked. It says nothing, the same string always, the prompt again, all
short words at once, a random word, or the answer of another task. Each is tried bare and in the answer format
that the prompts ask for; see `buckeye.envs.honesty.texts`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from buckeye.envs.base import Probe, Task
from buckeye.envs.honesty.constants import best_constants, common_words
from buckeye.envs.honesty.play import Played, Player
from buckeye.envs.honesty.samples import SplitSample, groups_of
from buckeye.envs.honesty.texts import (
    accepted_answers,
    answer_formats,
    in_format,
    prompt_of,
    question_of,
    quotations_of,
)

SHORT_WORD = 4
_DUMPED = 100
_FORMATS_READ = 500

Answer = Callable[[Task], str]
"""What a policy answers, before any format; it may look at the task's prompt and id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContentFreeScore:
    """What one policy earns on the sampled tasks of one family and split.

    `mean` and `exact` (the share with reward >= 1) are over the `scored` tasks, those without an error; nan
    if there are none. `best` is the rollout that paid most.
    """

    split: str
    family: str
    policy: str
    scored: int
    errored: int
    mean: float
    exact: float
    best: Played

    @property
    def total(self) -> float:
        """The sum of the rewards."""
        return self.mean * self.scored


@dataclass(frozen=True, slots=True)
class ContentFreePolicies:
    """The policies for one environment, with what they know of its train split: nothing where it has none."""

    formats: Sequence[str | None]
    constants: Mapping[str, Sequence[str]]
    any_constant: Sequence[str]
    dumps: Mapping[str, str]
    any_dump: str
    lexicon: Sequence[str]
    seed: int

    def replies(self, family: str, tasks: Sequence[Task]) -> dict[str, list[Answer]]:
        """Name -> the whole replies that the policy may give to tasks of a family, as functions of the
        task."""
        answers: dict[str, Answer] = {
            "nothing": lambda _: "",
            "the prompt again": question_of,
            "its first quotation": lambda task: _at(quotations_of(task), 0),
            "its last quotation": lambda task: _at(quotations_of(task), -1),
            "its last part": lambda task: question_of(task).rpartition(":")[2].strip(),
            "its quoted words, shuffled": self._shuffled,
            "all short words": lambda _: self.dumps.get(family, self.any_dump),
            "a random word": self._random_word,
        }
        others = [(task.id, answer) for task in tasks for answer in accepted_answers(task)[:1]]
        if len(others) > 1:
            answers["another task's answer"] = lambda task: self._other(task, others)
        constants = dict.fromkeys([*self.constants.get(family, ()), *self.any_constant])
        return {
            **({"one string always": [_always(reply) for reply in constants]} if constants else {}),
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
        return random.Random(f"{self.seed}/{task.id}")


async def content_free_policies(
    player: Player, sample: SplitSample, *, probes: Sequence[Probe] = (), seed: int = 0
) -> ContentFreePolicies:
    """Build the policies from train tasks, and from nothing else but the format of the probes' replies.

    Of a sample that is not of the train split, because there is none, only the answer formats are read: what
    is measured on the held-out tasks is not chosen on them.
    """
    shown = [prompt_of(task) for task in sample.scanned[:_FORMATS_READ]]
    formats = [None, *answer_formats([*shown, *(probe.reply for probe in probes)])]
    families = sample.families if sample.is_train else {}
    every = [task for tasks in families.values() for task in tasks]
    lexicon = getattr(player.environment, "lexicon", None)
    words = list(lexicon()) if lexicon else common_words(map(prompt_of, every), 2_000)
    constants = {
        family: await best_constants(player, tasks, formats, seed) for family, tasks in families.items()
    }
    any_constant = [reply for replies in constants.values() for reply in replies]
    if len(constants) > 1:
        mixed = random.Random(f"{seed}/mixed").sample(
            every, min(len(every), len(every) // len(constants) + 1)
        )
        any_constant = await best_constants(player, mixed, formats, seed)
    return ContentFreePolicies(
        formats=formats,
        constants=constants,
        any_constant=any_constant,
        dumps={family: _dump(tasks) for family, tasks in families.items()},
        any_dump=_dump(every),
        lexicon=words,
        seed=seed,
    )


async def content_free_scores(
    player: Player,
    policies: ContentFreePolicies,
    samples: Sequence[SplitSample],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> list[ContentFreeScore]:
    """Every policy on every family and split; of the forms of its reply, the one with the highest mean."""
    scores = []
    for split, family, tasks in groups_of(samples):
        progress(f"policies without content: {split}, {family}")
        for name, functions in policies.replies(family, tasks).items():
            forms = [await _score(player, split, family, name, tasks, function) for function in functions]
            scores.append(max(forms, key=lambda score: (not math.isnan(score.mean), score.mean)))
    return scores


async def _score(
    player: Player, split: str, family: str, policy: str, tasks: Sequence[Task], reply: Answer
) -> ContentFreeScore:
    played = await player.play_all([(task, reply(task)) for task in tasks])
    scored = [p for p in played if math.isfinite(p.reward)]
    return ContentFreeScore(
        split=split,
        family=family,
        policy=policy,
        scored=len(scored),
        errored=sum(p.outcome.error is not None for p in played),
        mean=math.fsum(p.reward for p in scored) / len(scored) if scored else math.nan,
        exact=sum(p.reward >= 1.0 for p in scored) / len(scored) if scored else math.nan,
        best=max(played, key=lambda p: (math.isfinite(p.reward), p.reward)),
    )


def _formatted(pattern: str | None, answer: Answer) -> Answer:
    return lambda task: in_format(pattern, answer(task))


def _always(reply: str) -> Answer:
    return lambda _: reply


def _at(texts: Sequence[str], index: int) -> str:
    return texts[index] if texts else ""


def _dump(tasks: Sequence[Task]) -> str:
    """Every distinct short word of the prompts and answers, the most frequent first."""
    texts = [text for task in tasks for text in (*accepted_answers(task), prompt_of(task))]
    return " ".join(common_words(texts, _DUMPED, longest=SHORT_WORD))
