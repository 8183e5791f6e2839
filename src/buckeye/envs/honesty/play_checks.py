"""Checks that play rollouts with written replies. Each returns one line of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from buckeye.envs.base import Environment, Probe, Task
from buckeye.envs.baselines import ContentFreeScore
from buckeye.envs.honesty.play import FailingPolicy, Played, Player, outcome_with
from buckeye.envs.honesty.result import CheckResult, failed, not_run, passed, shortened
from buckeye.envs.honesty.samples import SplitSample, groups_of
from buckeye.envs.honesty.texts import ANSWER, accepted_answers, in_format, question_of

PAID = 0.5
"""What a right answer earns at least."""

_TOLERANCE = 1e-9
_PAID_TASKS = 20
_REGRADED_TASKS = 5


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A probe and the reward it got; None where the rollout errored, with the error."""

    probe: Probe
    got: float | None
    error: str | None

    @property
    def ok(self) -> bool:
        """Whether the reward is where the probe says."""
        low, high = self.probe.low - _TOLERANCE, self.probe.high + _TOLERANCE
        return self.got is not None and low <= self.got <= high

    @property
    def expected(self) -> str:
        """The score, or the range of scores, for people."""
        low, high = self.probe.low, self.probe.high
        return f"{low:g}" if low == high else f"{low:g} to {high:g}"


async def play_probes(player: Player, probes: Sequence[Probe]) -> list[ProbeResult]:
    """Play every probe once."""
    results = []
    for probe in probes:
        outcome = (await player.play(probe.task, probe.reply)).outcome
        results.append(ProbeResult(probe, outcome.reward, outcome.error))
    return results


def check_probes(results: Sequence[ProbeResult]) -> CheckResult:
    """Every probe gets the reward it should."""
    wrong = [result for result in results if not result.ok]
    if not results:
        return not_run("probes", "the environment has no member probes()")
    if not wrong:
        return passed("probes", f"{len(results)} got what they should")
    first = wrong[0]
    got = f"{first.got:g}" if first.got is not None else f"an error ({first.error})"
    return failed(
        "probes",
        f"{len(wrong)} of {len(results)} wrong, as {first.probe.name!r}: got {got}, not {first.expected}, "
        f"for {shortened(first.probe.reply)!r}",
    )


async def check_paid(
    player: Player, samples: Sequence[SplitSample], formats: Sequence[str | None]
) -> CheckResult:
    """An accepted answer earns at least `PAID`, bare or in a format that the prompts show.

    Without this a grader that pays nothing would pass everything else.
    """
    name, answers, unpaid = "accepted answers are paid", 0, list[tuple[str, Task, str, float]]()
    for split, _, tasks in groups_of(samples):
        for task in tasks[:_PAID_TASKS]:
            for answer in accepted_answers(task):
                earned = [(await player.play(task, in_format(f, answer))).reward for f in formats]
                best = max(filter(math.isfinite, earned), default=math.nan)
                answers += 1
                if not best >= PAID:
                    unpaid.append((split, task, answer, best))
    if not answers:
        return not_run(name, "no task has `accept` or `answer` in its data")
    if not unpaid:
        return passed(name, f"{answers:,} answers earn at least {PAID:g}")
    split, task, answer, best = unpaid[0]
    forms = ", ".join(["bare", *(f.replace(ANSWER, "…") for f in formats if f is not None)])
    return failed(
        name,
        f"{len(unpaid):,} of {answers:,} earn less than {PAID:g}, as {answer!r} for {task.id} of {split}: "
        f"{best:g} ({forms}). If replies have another format, show it in a probe",
    )


async def played_twice(
    player: Player, samples: Sequence[SplitSample], formats: Sequence[str | None], probes: Sequence[Probe]
) -> list[Played]:
    """Rollouts to be repeated later: right, echoing and empty replies to some tasks, and the probes."""
    replies: list[tuple[Task, str]] = [(probe.task, probe.reply) for probe in probes]
    for _, _, tasks in groups_of(samples):
        for task in tasks[:_REGRADED_TASKS]:
            answers = accepted_answers(task)[:1] or (question_of(task),)
            replies += [(task, in_format(pattern, answer)) for pattern in formats for answer in answers]
            replies += [(task, question_of(task)), (task, "")]
    return await player.play_all(replies)


async def check_same_grade(environments: Sequence[Environment], before: Sequence[Played]) -> CheckResult:
    """The same reply to the same task has the same outcome, later, in another order and a new environment."""
    name = "same grade again"
    for environment in environments:
        player = Player(environment)
        for played in reversed(before):
            again = await player.play(played.task, played.reply)
            if _graded(again) != _graded(played):
                return failed(
                    name,
                    f"{played.task.id}: {_graded(played)}, then {_graded(again)}, for "
                    f"{shortened(played.reply)!r}",
                )
    return passed(name, f"{len(before):,} replies graded {len(environments) + 1} times")


async def check_errors_unscored(environment: Environment, samples: Sequence[SplitSample]) -> CheckResult:
    """A rollout whose engine failed has an error and no reward."""
    name = "errors are not scored"
    tasks = [tasks[0] for _, _, tasks in groups_of(samples)]
    for task in tasks:
        outcome = await outcome_with(environment, task, FailingPolicy())
        if outcome.reward is not None:
            return failed(name, f"a failing engine gets reward {outcome.reward:g} on {task.id}; it has none")
    return passed(name, f"a failing engine on {len(tasks)} tasks")


def check_all_graded(player: Player) -> CheckResult:
    """No reply made the environment raise or give up: a reply is data, however odd."""
    if not player.errored:
        return passed("every reply is graded", f"{player.rollouts:,} rollouts without an error")
    first = player.errored[0]
    return failed(
        "every reply is graded",
        f"{len(player.errored):,} of {player.rollouts:,} rollouts errored, as {first.task.id} on "
        f"{shortened(first.reply)!r}: {shortened(str(first.outcome.error), 200)}",
    )


def check_range(player: Player) -> CheckResult:
    """All rewards are finite and in [0, 1]."""
    name = "rewards from 0 to 1"
    if not player.outside:
        return passed(name, f"{player.rollouts - len(player.errored):,} rewards")
    worst = max(player.outside, key=lambda played: _distance(played.reward))
    return failed(
        name,
        f"{len(player.outside):,} outside, as {worst.reward:g} for {worst.task.id} on "
        f"{shortened(worst.reply)!r}",
    )


def check_content_free(
    scores: Sequence[ContentFreeScore], limit: float, samples: Sequence[SplitSample]
) -> CheckResult:
    """No policy without content has a mean reward above `limit` on any family of any split.

    Where a family has so few tasks that a single solved one is more than that, one may be solved by luck.
    Where only so few of them were played, a mean above the limit says nothing, so the check was not made.
    """
    name = f"content-free policies below {limit:g}"
    unscored = [score for score in scores if not score.scored]
    if unscored:
        return failed(name, f"no rollout of {unscored[0].family} in {unscored[0].split} could be scored")
    over = [score for score in scores if _too_good(score, limit)]
    lucky = [score for score in scores if score.mean > limit + _TOLERANCE and score not in over]
    groups, policies = _groups(scores), len({score.policy for score in scores})
    if over:
        worst = max(over, key=lambda score: score.mean)
        return failed(
            name,
            f"{_where(worst)} ({worst.scored} tasks; {shortened(worst.best.reply)!r} earns "
            f"{worst.best.reward:g} on {worst.best.task.id}); {_groups(over)} of {groups} families and "
            "splits are above",
        )
    whole = {(s.name, family): s.known(family) for s in samples for family in s.families}
    played = {(split, family): len(tasks) for split, family, tasks in groups_of(samples)}
    cut = [score for score in lucky if played[_group(score)] < whole[_group(score)]]
    if cut:
        worst = max(cut, key=lambda score: score.mean)
        needed = max(_tasks_needed(whole[_group(score)], limit) for score in cut)
        return not_run(
            name,
            f"sample too small for {_listed(cut)}: {_where(worst)}, with {played[_group(worst)]} of "
            f"{whole[_group(worst)]} tasks played; give --sample {needed}",
        )
    best = max([s for s in scores if s not in lucky] or scores, key=lambda score: score.mean)
    forgiven = f"; one lucky answer forgiven in {_groups(lucky)} with few tasks" if lucky else ""
    return passed(
        name, f"at most {_where(best)}; {policies} policies, {groups} families and splits{forgiven}"
    )


def _too_good(score: ContentFreeScore, limit: float) -> bool:
    by_luck = score.best.reward if limit * (score.scored + score.errored) < 1.0 else 0.0
    return score.total - by_luck > limit * score.scored + _TOLERANCE and score.mean > limit


def _tasks_needed(there_are: int, limit: float) -> int:
    """So many tasks that a single solved one is no more than the limit, or all of them."""
    return there_are if limit * there_are < 1.0 else math.ceil(1.0 / limit)


def _group(score: ContentFreeScore) -> tuple[str, str]:
    return score.split, score.family


def _groups(scores: Sequence[ContentFreeScore]) -> int:
    return len(set(map(_group, scores)))


def _listed(scores: Sequence[ContentFreeScore]) -> str:
    return ", ".join(f"{family} in {split}" for split, family in dict.fromkeys(map(_group, scores)))


def _where(score: ContentFreeScore) -> str:
    return f"{score.mean:.3f} by {score.policy!r} on {score.family} in {score.split}"


def _graded(played: Played) -> str:
    outcome = played.outcome
    components: Mapping[str, float] = dict(sorted(outcome.components.items()))
    graded = "an error" if outcome.error is not None else f"reward {outcome.reward!r}"
    return f"{graded} ({outcome.stop_reason}{''.join(f', {k} {v!r}' for k, v in components.items())})"


def _distance(reward: float) -> float:
    """How far from [0, 1]."""
    return max(-reward, reward - 1.0) if math.isfinite(reward) else math.inf
