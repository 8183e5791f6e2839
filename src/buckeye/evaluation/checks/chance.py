"""What guessing earns, and whether rewards are more than that.

A guesser knows which answers there are, and nothing of the task. One of K answers that come again and again
has to be right in 1 / K of the tasks at least, and one of M options that a prompt lists is right with the
chance 1 / M: so much is no defect. More is one, if it cannot be luck.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from buckeye.envs.base import Task
from buckeye.evaluation.checks.samples import SplitSample, family_of, groups_of
from buckeye.evaluation.checks.texts import accepted_answers, folded, holds, prompt_of

LEVEL = 0.01
"""The probability at most of any false alarm in a check, all its comparisons together."""

_STAKES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
_CLAUSE = re.compile(r"\n|[?!:;(){}\[\]]|\.(?=\s|$)")
_BETWEEN = re.compile(r"\s*(?:,\s*(?:or|and)\b|[,|]|(?<=\w)/(?=\w)|\b(?:or|and)\b)\s*")
_LISTED = re.compile(r"^\s*(?:[-*•]|\(?([a-z]|\d{1,2})[.):])\s+(.+?)\s*$", re.MULTILINE)
_MARKS = "\"'`*“”«» "


@dataclass(frozen=True, slots=True)
class Chance:
    """What a guess is worth on the tasks of a family and split: 0 where answers are not known, all differ,
    or are all the same."""

    share: float

    def __str__(self) -> str:
        return f"chance is {self.share:.3f}"


def chances(samples: Sequence[SplitSample]) -> dict[tuple[str, str], Chance]:
    """(split, family) -> what a guess earns there. The answers there are is counted over all that was read
    of a family, in every split."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for sample in samples:
        for task in sample.scanned:
            answers[family_of(task)].update(folded(answer) for answer in accepted_answers(task)[:1])
    guesses = {family: _guess(counts) for family, counts in answers.items()}
    return {(split, family): _chance(tasks, guesses[family]) for split, family, tasks in groups_of(samples)}


def _guess(counts: Counter[str]) -> float:
    """1 / K for K answers, but no more than how often two tasks have the same one: where all differ, they are
    no choice. Nor is a single answer."""
    tasks = counts.total()
    if len(counts) < 2:
        return 0.0
    same = sum(count * (count - 1) for count in counts.values()) / (tasks * (tasks - 1))
    return min(1.0 / len(counts), same)


def _chance(tasks: Sequence[Task], guess: float) -> Chance:
    listed = [options_of(task, accepted_answers(task)) for task in tasks]
    share = statistics.fmean(max(guess, 1.0 / options if options else 0.0) for options in listed)
    return Chance(share)


def options_of(task: Task, answers: Sequence[str]) -> int:
    """How many options the prompt lists, if one of the answers is among them; else 0."""
    prompt = folded(prompt_of(task))
    return max((_options(prompt, folded(answer)) for answer in answers), default=0)


def _options(prompt: str, answer: str) -> int:
    if not answer:
        return 0
    listed = _LISTED.findall(prompt)
    counts = [0]
    if any(answer in (label, text.strip(_MARKS)) for label, text in listed):
        counts.append(len(listed))
    for clause in _CLAUSE.split(prompt):
        if answer in clause:
            pieces = [piece.strip(_MARKS) for piece in _BETWEEN.split(clause)]
            counts.append(len(pieces) if _is_one(pieces, answer) else 0)
    most = max(counts)
    return most if most > 1 else 0


def _is_one(pieces: Sequence[str], answer: str) -> bool:
    """Whether the answer is an item: the first may follow other words, and the last be followed by some."""
    first, last = pieces[0], pieces[-1]
    ends = first.endswith(answer) and holds(first, answer)
    return ends or answer in pieces or (last.startswith(answer) and holds(last, answer))


def evidence(rewards: Collection[float], mean: float) -> float:
    """How strongly rewards speak against an expected reward of at most `mean`: an e-value.

    It is what a gambler has who began with 1 and stakes a share of it on every reward, at odds that are fair
    for `mean` (Waudby-Smith and Ramdas 2024), over several shares. If the expectation is no more than `mean`,
    it gets to 1 / p with a probability of p at most: for every distribution of rewards from 0, however few
    there are, and whenever one stops. A reward below 0 counts as 0.
    """
    if mean >= 1.0:
        return 0.0
    fair = max(mean, 1e-9)
    grown = [math.fsum(math.log1p(stake * (max(r, 0.0) / fair - 1.0)) for r in rewards) for stake in _STAKES]
    return statistics.fmean(math.exp(min(log, 600.0)) for log in grown)


def is_above(forms: Collection[Collection[float]], mean: float, comparisons: int) -> bool:
    """Whether the expected reward is above `mean` in one of the forms of a reply, beyond luck. `comparisons`
    is how many such questions are asked; the forms of one count as one, for a mean of e-values is one."""
    strength = [evidence(rewards, mean) for rewards in forms if rewards]
    return bool(strength) and statistics.fmean(strength) >= comparisons / LEVEL
