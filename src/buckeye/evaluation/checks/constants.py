"""Search for the constant replies with the highest mean reward on train tasks."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence

from buckeye.envs.base import Task
from buckeye.evaluation.checks.scripted_runner import ScriptedRunner
from buckeye.evaluation.checks.task_text import accepted_answers, apply_format, prompt_of, words_of

KEPT = 2
SELECTION_TASKS = 40
"""Number of train tasks on which the constants of a family are chosen."""

_CANDIDATES = 8
_MAX_STEPS, _STEPS_PER_TASK = 150, 5


def common_words(texts: Iterable[str], count: int, *, longest: int | None = None) -> list[str]:
    """Return the most frequent words; words with equal counts are in order of appearance.

    Words longer than `longest` are skipped.
    """
    counts = Counter(
        word for text in texts for word in words_of(text) if longest is None or len(word) <= longest
    )
    return [word for word, _ in counts.most_common(count)]


async def choose_constants(
    runner: ScriptedRunner,
    tasks: Sequence[Task],
    known: Sequence[Task],
    formats: Sequence[str | None],
    seed: int,
) -> list[str]:
    """Return the `KEPT` constant replies with the highest mean reward on `tasks`.

    The candidates are the most frequent accepted answers of `known` and the most frequent words of answers
    and prompts. A hill climb, which changes letters and words, improves the best candidate.
    """
    answers = Counter(answer for task in known for answer in accepted_answers(task))
    frequent = [answer for answer, _ in answers.most_common(_CANDIDATES)]
    words = common_words(answers, _CANDIDATES) + common_words(map(prompt_of, tasks), _CANDIDATES)
    rewards: dict[tuple[str | None, str], float] = {}
    for answer in dict.fromkeys([*frequent, *words, *_letters(words)[:_CANDIDATES]]):
        for pattern in reversed(formats):  # most tasks expect a format, so the bare answer comes last
            if runner.has_time:
                rewards[pattern, answer] = await mean_reward(runner, tasks, apply_format(pattern, answer))
    ranked = sorted(rewards, key=lambda candidate: -rewards[candidate])
    if ranked and rewards[ranked[0]] > 0:  # if no reply has a reward, a hill climb has no direction
        ranked.insert(0, await _climb(runner, tasks, ranked[0], rewards[ranked[0]], words, seed))
    shortlist = [*ranked[:1], *((formats[-1], answer) for answer in frequent), *ranked]
    return list(dict.fromkeys(apply_format(*candidate) for candidate in shortlist))[:KEPT]


async def mean_reward(runner: ScriptedRunner, tasks: Sequence[Task], reply: str) -> float:
    """Return the mean reward of one reply over the scored tasks; 0 if all rollouts errored."""
    results = await runner.run_all([(task, reply) for task in tasks])
    scored = [p.reward for p in results if p is not None and math.isfinite(p.reward)]
    return math.fsum(scored) / len(scored) if scored else 0.0


async def _climb(
    runner: ScriptedRunner,
    tasks: Sequence[Task],
    start: tuple[str | None, str],
    reward: float,
    words: Sequence[str],
    seed: int,
) -> tuple[str | None, str]:
    """Improve `start` with random changes of a letter or a word, and return the best reply found."""
    rng, (pattern, answer) = random.Random(f"{seed}/climb"), start  # noqa: S311  not for security
    for _ in range(min(_MAX_STEPS, _STEPS_PER_TASK * len(tasks))):
        if not runner.has_time:
            break
        changed = change_randomly(answer, words, rng)
        changed_reward = await mean_reward(runner, tasks, apply_format(pattern, changed))
        if changed_reward > reward:
            answer, reward = changed, changed_reward
    return pattern, answer


def change_randomly(answer: str, words: Sequence[str], rng: random.Random) -> str:
    """Return the answer with one random change of a letter or a word."""
    at = rng.randint(0, len(answer))
    letter = rng.choice(_letters(words) or ["a"])
    word = rng.choice(words or ["a"])  # prompts may have no words: "3+3=?"
    choices = (
        answer[:at] + letter + answer[at:],
        answer[:at] + answer[at + 1 :],
        answer[:at] + letter + answer[at + 1 :],
        f"{answer} {word}",
        f"{word} {answer}",
        answer + word,
    )
    return rng.choice(choices)


def _letters(words: Sequence[str]) -> list[str]:
    """Return the letters of the words, most frequent first."""
    return [letter for letter, _ in Counter("".join(words)).most_common()]
