"""Checks that run rollouts with scripted replies. Each check returns a `CheckResult`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buckeye.base.columns import counted
from buckeye.envs.base import Environment, Probe, Task
from buckeye.envs.scripted import FailingPolicy
from buckeye.errors import UsageError
from buckeye.evaluation.checks.answer_order import check_answer_order
from buckeye.evaluation.checks.chance import is_above
from buckeye.evaluation.checks.result import (
    NO_ANSWERS,
    CheckResult,
    CheckStatus,
    out_of_time_result,
    shortened,
)
from buckeye.evaluation.checks.samples import SplitSample, groups_of
from buckeye.evaluation.checks.scripted_runner import TOLERANCE, ScriptedRollout, ScriptedRunner
from buckeye.evaluation.checks.task_text import (
    ANSWER,
    USUAL_FORMATS,
    accepted_answers,
    apply_format,
    question_of,
    written_answers,
)
from buckeye.evaluation.content_free import ContentFreeScore

MIN_ANSWER_REWARD = 0.5
"""Minimum reward of an accepted answer."""

TASK_TOOLS = "tools of tasks exist"
"""Name of the check of the tools and arguments that tasks name."""

_UNUSUAL = ("é, 你好, 🙂 and ∞", "²", "9" * 400, '{"')
"""Texts that graders forget: letters beyond ASCII, a digit without a value, a huge number, broken JSON."""

_ANSWER_TASKS = 20
_REGRADED_TASKS = 5
_FIRST_REGRADED = 8


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Probe with its reward, or with the error of an errored rollout."""

    probe: Probe
    reward: float | None
    error: str | None

    @property
    def is_expected(self) -> bool:
        """True if the reward is within the probe's range."""
        low, high = self.probe.low - TOLERANCE, self.probe.high + TOLERANCE
        return self.reward is not None and low <= self.reward <= high

    @property
    def expected(self) -> str:
        """Expected score, or range of scores, as text."""
        low, high = self.probe.low, self.probe.high
        return f"{low:g}" if low == high else f"{low:g} to {high:g}"


async def run_probes(runner: ScriptedRunner, probes: Sequence[Probe]) -> list[ProbeResult]:
    """Run every probe once, within the time limit."""
    results = await runner.run_all([(probe.task, probe.reply) for probe in probes])
    return [
        ProbeResult(probe, played.outcome.reward, played.outcome.error)
        for probe, played in zip(probes, results, strict=True)
        if played is not None
    ]


def check_probes(results: Sequence[ProbeResult], offered: int) -> CheckResult:
    """Check that every probe gets its expected reward."""
    name, wrong = "probes", [result for result in results if not result.is_expected]
    if not offered:
        return CheckResult(name, "not run", "the environment has no member probes()")
    if not results:
        return out_of_time_result(name)
    if not wrong:
        return CheckResult(name, "pass", f"{len(results)} got the expected reward")
    first = wrong[0]
    got = f"{first.reward:g}" if first.reward is not None else f"an error ({first.error})"
    return CheckResult(
        name,
        "error",
        f"{len(wrong)} of {len(results)} wrong; for example {first.probe.name!r}: got {got}, expected "
        f"{first.expected}, for reply {shortened(first.probe.reply)!r}",
    )


async def check_answers_rewarded(
    runner: ScriptedRunner, samples: Sequence[SplitSample], formats: Sequence[str | None]
) -> CheckResult:
    """Check that accepted answers are rewarded: bare, as the prompts show, or in a usual format.

    Without this check, a grader that always gives 0 would pass all other checks. If the answers in the data
    are numbers and none is rewarded, the check does not fail: the numbers may be positions in a list. If the
    environment sets `has_own_scale`, its rewards are compared with each other, not with a minimum.
    """
    name = "accepted answers are rewarded"
    answers = [
        (split, task, answer)
        for split, _, tasks in groups_of(samples)
        for task in [task for task in tasks if accepted_answers(task)][:_ANSWER_TASKS]
        for answer in accepted_answers(task)
    ]
    if not answers:
        return CheckResult(name, "not run", NO_ANSWERS)
    if getattr(runner.environment, "has_own_scale", False):
        return await check_answer_order(name, runner, samples, formats)
    forms = list(dict.fromkeys([*formats, *USUAL_FORMATS]))
    best = await _best_rewards(runner, answers, formats)
    low = [index for index, reward in enumerate(best) if reward is not None and not _is_rewarded(reward)]
    usual = await _best_rewards(runner, [answers[index] for index in low], USUAL_FORMATS)
    for index, reward in zip(low, usual, strict=True):
        best[index] = reward if reward is None or _is_rewarded(reward) else best[index]
    tested = sum(reward is not None for reward in best)
    failing = [
        (*answer, reward)
        for answer, reward in zip(answers, best, strict=True)
        if reward is not None and not _is_rewarded(reward)
    ]
    if not tested:
        return out_of_time_result(name)
    if not failing:
        detail = f"{counted(tested, 'answer')} with a reward of at least {MIN_ANSWER_REWARD:g}"
        rewarded = _rewarded_tasks(answers, best)
        faults = [await find(runner, rewarded, forms) for find in (_both_rewarded, _first_letter_rewarded)]
        return CheckResult(name, "warning" if any(faults) else "pass", "".join([detail, *faults]))
    split, task, answer, highest = failing[0]
    if len(failing) == tested and not any(written_answers(task) for _, task, _, _ in failing):
        return CheckResult(
            name,
            "not run",
            f"answers are not text in the dataset, and the text {answer!r} has reward {highest:g}; add a "
            "probe with a right reply",
        )
    shown = ", ".join(["bare", *(f.replace(ANSWER, "…") for f in forms if f is not None)])
    return CheckResult(
        name,
        "error",
        f"{len(failing):,} of {tested:,} answers have a reward below {MIN_ANSWER_REWARD:g}; for example "
        f"{answer!r} for {task.id} of {split}: {highest:g} ({shown}). If replies need another format, "
        "add a probe that has it",
    )


async def _both_rewarded(
    runner: ScriptedRunner, tasks: Sequence[tuple[Task, str, float]], forms: Sequence[str | None]
) -> str:
    """Return an addition to the detail if replies with the answers of two tasks are rewarded for both."""
    pairs = [
        (one, other)
        for one, other in zip(tasks[::2], tasks[1::2], strict=False)
        if not set(accepted_answers(one[0])) & set(accepted_answers(other[0]))
    ]
    found = list[str]()
    for one, other in pairs:
        replies = [apply_format(form, f"{one[1]} or {other[1]}") for form in forms]
        for side in (one, other):
            results = await runner.run_all([(side[0], reply) for reply in replies])
            rewarded = {r.reply for r in results if r is not None and r.reward >= side[2] - TOLERANCE}
            replies = [reply for reply in replies if reply in rewarded]
        found += replies[:1]
    if not pairs or 2 * len(found) < len(pairs):
        return ""
    return f", and replies with two answers have it for both tasks; for example {shortened(found[0])!r}"


def _rewarded_tasks(
    answers: Sequence[tuple[str, Task, str]], best: Sequence[float | None]
) -> list[tuple[Task, str, float]]:
    """Return the tasks with a reward, each with its last answer."""
    last = {task.id: (task, answer, reward) for (_, task, answer), reward in zip(answers, best, strict=True)}
    return [(task, answer, reward) for task, answer, reward in last.values() if reward is not None]


async def _first_letter_rewarded(
    runner: ScriptedRunner, tasks: Sequence[tuple[Task, str, float]], forms: Sequence[str | None]
) -> str:
    """Return an addition to the detail if the first letter of an answer is rewarded like the answer.

    The letter must also begin another answer, so that it does not name the answer, and the next letter in the
    alphabet must not be rewarded.
    """
    initials = Counter(answer[0].lower() for answer in {answer for _, answer, _ in tasks if answer})
    tasks = [
        one for one in tasks if len(one[1]) > 2 and one[1][0].isalpha() and initials[one[1][0].lower()] > 1
    ]
    replies = [
        (task, apply_format(form, letter))
        for task, answer, _ in tasks
        for form in forms
        for letter in (answer[0], chr(ord(answer[0]) + 1))
    ]
    rewards = [math.nan if played is None else played.reward for played in await runner.run_all(replies)]
    found = list[str]()
    for number, (_, answer, reward) in enumerate(tasks):
        of_task = rewards[2 * number * len(forms) : 2 * (number + 1) * len(forms)]
        pairs = zip(of_task[::2], of_task[1::2], strict=True)
        if any(right >= reward - TOLERANCE and wrong < reward - TOLERANCE for right, wrong in pairs):
            found.append(answer)
    if not tasks or 2 * len(found) < len(tasks):
        return ""
    return f", and their first letter has it as well; for example {found[0][0]!r} for {found[0]!r}"


def _is_rewarded(reward: float) -> bool:
    return reward >= MIN_ANSWER_REWARD


async def _best_rewards(
    runner: ScriptedRunner, answers: Sequence[tuple[str, Task, str]], formats: Sequence[str | None]
) -> list[float | None]:
    """Return the best reward of each answer of (split, task, answer) in the formats; None: out of time."""
    replies = [(task, apply_format(pattern, answer)) for _, task, answer in answers for pattern in formats]
    results = await runner.run_all(replies)
    best = list[float | None]()
    for start in range(0, len(results), len(formats)):
        rewards = [played.reward for played in results[start : start + len(formats)] if played is not None]
        finite = max(filter(math.isfinite, rewards), default=math.nan)
        best.append(finite if len(rewards) == len(formats) else None)
    return best


async def check_grades_repeatable(
    runners: Sequence[ScriptedRunner],
    samples: Sequence[SplitSample],
    formats: Sequence[str | None],
    probes: Sequence[Probe],
) -> CheckResult:
    """Check that a reply to a task gets equal outcomes in repeated rollouts.

    The rollouts are repeated in reverse order, also in a second object of the environment. Their replies are
    accepted answers, the question itself, empty replies, unusual texts, and the probes. The first rollouts of
    the whole check are repeated, too.
    """
    name = "grades are repeatable"
    replies: list[tuple[Task, str]] = [(probe.task, probe.reply) for probe in probes]
    firsts = [tasks[0] for _, _, tasks in groups_of(samples)]
    replies += [(task, apply_format(form, text)) for task in firsts for text in _UNUSUAL for form in formats]
    for place in range(_REGRADED_TASKS):
        for _, _, tasks in groups_of(samples):
            for task in tasks[place : place + 1]:
                answers = accepted_answers(task)[:1] or (question_of(task),)
                replies += [
                    (task, apply_format(pattern, answer)) for answer in answers for pattern in formats
                ]
                replies += [(task, question_of(task)), (task, "")]
    compared, start = 0, 0
    first = list(runners[0].first)
    while first or start < len(replies):
        for runner in runners:
            repeated = await runner.run_all([(rollout.task, rollout.reply) for rollout in reversed(first)])
            for before, after in zip(reversed(first), repeated, strict=True):
                if after is None or after.outcome.error is not None:
                    continue  # `check_all_graded` reports errors
                if _grade(after) != _grade(before):
                    detail = f"{before.task.id}: {_grade(before)}, then {_grade(after)}"
                    return CheckResult(name, "error", f"{detail}, for reply {shortened(before.reply)!r}")
                compared += 1
        end = 2 * start + _FIRST_REGRADED
        results = await runners[0].run_all(replies[start:end])
        first = [rollout for rollout in results if rollout is not None and rollout.outcome.error is None]
        start = end
    if not compared:
        return _no_reward_result(name, runners[0])
    return CheckResult(name, "pass", f"{counted(compared, 'rollout')} repeated")


async def check_errors_unscored(runner: ScriptedRunner, samples: Sequence[SplitSample]) -> CheckResult:
    """Check that a rollout has an error and no reward if the inference engine fails."""
    name = "errors are not scored"
    tasks = [tasks[0] for _, _, tasks in groups_of(samples)]
    outcomes = [await runner.outcome(task, FailingPolicy()) for task in tasks]
    finished = [(task, outcome) for task, outcome in zip(tasks, outcomes, strict=True) if outcome is not None]
    for task, outcome in finished:
        if outcome.reward is not None:
            detail = f"reward {outcome.reward:g} although the engine failed, on {task.id}; return an error"
            return CheckResult(name, "error", detail)
    if not finished:
        return out_of_time_result(name)
    return CheckResult(name, "pass", f"{counted(len(finished), 'task')} run with a failing engine")


async def check_tools(environment: Environment) -> list[CheckResult]:
    """Check the tools and arguments that tasks name, if the environment has a member `check_tools`."""
    check: Callable[[], Awaitable[None]] | None = getattr(environment, "check_tools", None)
    if check is None:
        return []
    name = TASK_TOOLS
    try:
        await check()
    except UsageError as error:
        return [CheckResult(name, "error", str(error))]
    return [CheckResult(name, "pass", "no unknown tool or argument found")]


async def check_isolated(environment: Environment, seconds: float) -> list[CheckResult]:
    """Compare sequential and concurrent rollouts, if the environment has a member `isolation`.

    MCP environments have this member. The result is empty without it.
    """
    compare: Callable[[float], Awaitable[Any]] | None = getattr(environment, "isolation", None)
    if compare is None:
        return []
    result = await compare(seconds)
    status: CheckStatus = "not run" if result.problem else "pass"
    if result.shared:
        status = "note" if result.allowed else "error"
    return [CheckResult("rollouts do not see each other", status, str(result))]


def check_all_graded(runner: ScriptedRunner) -> CheckResult:
    """Check that the environment raises for no reply.

    If all errors are timeouts, the result is a warning, because the machine may be slow.
    """
    name = "every reply is graded"
    if not runner.rollouts:
        return out_of_time_result(name)
    if not runner.errored:
        return CheckResult(name, "pass", f"{counted(runner.rollouts, 'rollout')} without an error")
    wrong = [rollout for rollout in runner.errored if rollout.outcome.boundary != "timeout"]
    first = (wrong or runner.errored)[0]
    return CheckResult(
        name,
        "error" if wrong else "warning",
        f"{len(runner.errored):,} of {runner.rollouts:,} rollouts errored; for example {first.task.id} on "
        f"reply {shortened(first.reply)!r}: {shortened(str(first.outcome.error), 200)}",
    )


def check_reward_range(runner: ScriptedRunner) -> CheckResult:
    """Check that all rewards are in [0, 1], because other checks assume this range."""
    name = "rewards from 0 to 1"
    if not runner.out_of_range:
        rewards = runner.rollouts - len(runner.errored)
        return (
            CheckResult(name, "pass", f"rewards: {rewards:,}") if rewards else _no_reward_result(name, runner)
        )
    worst = max(runner.out_of_range, key=lambda rollout: _distance(rollout.reward))
    return CheckResult(
        name,
        "warning",
        f"{counted(len(runner.out_of_range), 'reward')} outside; for example {worst.reward:g} for "
        f"{worst.task.id} on reply {shortened(worst.reply)!r}",
    )


def _no_reward_result(name: str, runner: ScriptedRunner) -> CheckResult:
    return (
        CheckResult(name, "not run", "every rollout errored") if runner.errored else out_of_time_result(name)
    )


def check_content_free(
    scores: Sequence[ContentFreeScore], limit: float, chance: Mapping[tuple[str, str], float]
) -> CheckResult:
    """Check that no content-free policy is significantly above chance plus `limit` on any family and split.

    The probability of a false alarm, over all comparisons, is at most `LEVEL`.
    """
    name = "content-free policies"
    with_rewards = [score for score in scores if score.scored]
    if not with_rewards:
        errored = any(score.errored for score in scores)
        return CheckResult(name, "error", "no rollout has a reward") if errored else out_of_time_result(name)
    over = [
        score for score in with_rewards if is_above(score.forms, chance[score.group] + limit, len(scores))
    ]
    worst = max(over or with_rewards, key=lambda score: score.mean - chance[score.group])
    groups = len({score.group for score in scores})
    if over:
        above = len({score.group for score in over})
        best = worst.best
        reply = (
            f"; reply {shortened(best.reply)!r} has reward {best.reward:g} on {best.task.id}" if best else ""
        )
        total = f"{above} of {groups} families and splits are above the limit"
        detail = f"{_describe_score(worst, chance)}{reply}; {total}"
        return CheckResult(name, "warning", detail)
    if worst.mean > chance[worst.group] + limit:
        detail = f"{_describe_score(worst, chance)}; not significant; raise --sample and --budget"
        return CheckResult(name, "note", detail)
    if not any(is_above([[1.0] * score.scored], limit, len(scores)) for score in with_rewards):
        count = max(score.scored for score in with_rewards)
        detail = f"too few tasks for a significant result ({count}); raise --sample and --budget"
        return CheckResult(name, "not run", detail)
    highest = f"at most {_describe_score(max(with_rewards, key=lambda score: score.mean), chance)}"
    if max(chance.values()) > limit:
        return CheckResult(name, "note", f"{highest}; compare all rewards with chance")
    policies = len({score.policy for score in scores})
    return CheckResult(name, "pass", f"{highest}; policies: {policies}, families and splits: {groups}")


def _describe_score(score: ContentFreeScore, chance: Mapping[tuple[str, str], float]) -> str:
    return (
        f"{score.mean:.3f} by {score.policy!r} on {score.family} in {score.split} "
        f"({counted(score.scored, 'task')}), where chance is {chance[score.group]:.3f}"
    )


def _grade(played: ScriptedRollout) -> str:
    outcome = played.outcome
    components: Mapping[str, float] = dict(sorted(outcome.components.items()))
    more = "".join(f", {name} {value!r}" for name, value in components.items())
    return f"reward {outcome.reward!r} ({outcome.stop_reason}{more})"


def _distance(reward: float) -> float:
    """Return the distance from [0, 1]."""
    return max(-reward, reward - 1.0)
