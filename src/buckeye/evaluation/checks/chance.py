"""Expected reward of guessing, and the test for rewards above it.

A guesser knows the possible answers, but not the task. If the tasks have K different answers, the most
frequent one is right in at least 1 / K of the tasks. A random one of M options in the prompt is right with
probability 1 / M. Only rewards significantly above these probabilities are a defect.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from buckeye.envs.base import Task
from buckeye.evaluation.checks.samples import SplitSample, family_of, groups_of
from buckeye.evaluation.checks.task_text import accepted_answers, contains_as_word, normalize, prompt_of

LEVEL = 0.01
"""Maximum probability of a false alarm in a check, over all its comparisons."""

_STAKES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
_CLAUSE = re.compile(r"\n|[?!:;(){}\[\]]|\.(?=\s|$)")
_BETWEEN = re.compile(r"\s*(?:,\s*(?:or|and)\b|[,|]|(?<=\w)/(?=\w)|\b(?:or|and)\b)\s*")
_LISTED = re.compile(r"^\s*(?:[-*•]|\(?([a-z]|\d{1,2})[.):])\s+(.+?)\s*$", re.MULTILINE)
_MARKS = "\"'`*“”«» "


def chance_by_group(samples: Sequence[SplitSample]) -> dict[tuple[str, str], float]:
    """Return the expected reward of a guess by (split, family).

    The expected reward is 0 if the answers are unknown, all distinct, or all equal. The answers of a family
    are counted over its tasks in all splits.
    """
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for sample in samples:
        for task in sample.scanned:
            answers[family_of(task)].update(normalize(answer) for answer in accepted_answers(task)[:1])
    guesses = {family: _guess_probability(counts) for family, counts in answers.items()}
    return {(split, family): _chance(tasks, guesses[family]) for split, family, tasks in groups_of(samples)}


def _guess_probability(counts: Counter[str]) -> float:
    """Return 1 / K for K answers, or the probability that two tasks share an answer if that is lower.

    The result is 0 if all answers are distinct, or if only one answer exists.
    """
    tasks = counts.total()
    if len(counts) < 2:
        return 0.0
    same = sum(count * (count - 1) for count in counts.values()) / (tasks * (tasks - 1))
    return min(1.0 / len(counts), same)


def _chance(tasks: Sequence[Task], guess: float) -> float:
    listed = [option_count(task, accepted_answers(task)) for task in tasks]
    return statistics.fmean(max(guess, 1.0 / options if options else 0.0) for options in listed)


def option_count(task: Task, answers: Sequence[str]) -> int:
    """Return the number of options in the prompt if an answer is one of them, else 0."""
    prompt = normalize(prompt_of(task))
    return max((_options(prompt, normalize(answer)) for answer in answers), default=0)


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
            counts.append(len(pieces) if _is_item(pieces, answer) else 0)
    count = max(counts)
    return count if count > 1 else 0


def _is_item(pieces: Sequence[str], answer: str) -> bool:
    """Return True if the answer is one of the items in `pieces`.

    Other words may precede the first item, and follow the last item.
    """
    first, last = pieces[0], pieces[-1]
    ends = first.endswith(answer) and contains_as_word(first, answer)
    return ends or answer in pieces or (last.startswith(answer) and contains_as_word(last, answer))


def e_value(rewards: Collection[float], mean: float) -> float:
    """Return the evidence, as an e-value, against an expected reward of at most `mean`.

    The e-value is the final capital of a gambler who starts with 1 and bets a fixed share of the capital on
    every reward, at odds that are fair for `mean`. The result is the average over several shares
    (Waudby-Smith and Ramdas 2024). If the expected reward is at most `mean`, the e-value reaches 1 / p with
    probability at most p. This holds for every distribution of nonnegative rewards, any sample size and any
    stopping time. Negative rewards count as 0.
    """
    if mean >= 1.0:
        return 0.0
    fair = max(mean, 1e-9)
    log_capitals = [
        math.fsum(math.log1p(stake * (max(r, 0.0) / fair - 1.0)) for r in rewards) for stake in _STAKES
    ]
    return statistics.fmean(math.exp(min(log, 600.0)) for log in log_capitals)


def mean_bounds(
    rewards: Collection[float], limits: tuple[float, float], comparisons: int
) -> tuple[float, float]:
    """Return bounds of the expected reward, which hold for all `comparisons` with probability 1 - `LEVEL`.

    Rewards are within `limits`. The bounds invert `e_value`.
    """
    lowest, width = limits[0], limits[1] - limits[0]
    shares = [(reward - lowest) / width for reward in rewards]
    low, high = _refuted_mean(shares, comparisons), _refuted_mean([1.0 - s for s in shares], comparisons)
    return lowest + low * width, lowest + (1.0 - high) * width


def _refuted_mean(shares: Collection[float], comparisons: int) -> float:
    """Return the largest expected value that the shares refute on one side, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        if e_value(shares, middle) >= 2 * comparisons / LEVEL:
            low = middle
        else:
            high = middle
    return low


def is_above(forms: Collection[Collection[float]], mean: float, comparisons: int) -> bool:
    """Return True if the expected reward of some form of a reply is significantly above `mean`.

    Each item of `forms` has the rewards of the reply in one answer format. `comparisons` is the number of
    tests in the whole check. All forms count as one test, because a mean of e-values is an e-value.
    """
    strength = [e_value(rewards, mean) for rewards in forms if rewards]
    return bool(strength) and statistics.fmean(strength) >= comparisons / LEVEL
