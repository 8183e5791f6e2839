"""Findings about learning from a run's metrics: reasons why it cannot learn. Cheap enough for every step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from pathlib import Path

from buckeye.base.columns import quoted
from buckeye.monitor.finding import Finding, advice_of, cause_of
from buckeye.monitor.metrics import StepMetrics
from buckeye.monitor.rollback import rollback_advice
from buckeye.monitor.verdicts import NEARLY_ALL

ENOUGH = 3
"""Minimum number of consecutive steps for a finding; fewer may be chance."""

_SURE = 2.0  # standard errors between two means
_SURE_OF_BEST = 4.0  # standard errors, where many means are compared
_SURE_OF_PEAK = 5.0
_SURE_OF_FIRST = 3.0
_ENOUGH_TO_RISE = 10  # steps
_LITTLE_ESS = 0.05
_SMALL_BIAS = 0.01
_EQUAL = 1e-9
RANDOM_LOGPROB = -4.0  # nats per sampled token of the first batch
PRETRAINED_LOGPROB = -2.0  # nats per sampled token of a pretrained model, at least
_COLLAPSES = ("collapsed", "endless", "moved_too_far")

FINDING_METRICS = (
    "reward/mean",
    "reward/std",
    "reward/played",
    "shaped_reward/mean",
    "shaped_reward/std",
    "batch/alike",
    "batch/groups",
    "batch/rollouts",
    "batch/solve_all",
    "batch/solve_none",
    "batch/with_spread",
    "is_truncated/mean",
    "logprob/mean",
    "completion_len/mean",
    "trained_tokens",
    "entropy",
    "effective_sample_size",
    "masked_low",
    "masked_high",
    "collection/bias/seconds",
    "collection/bias/seconds/errors",
    "collection/bias/completion_len",
    "collection/bias/completion_len/errors",
    "collection/failures/seconds",
    "collection/failures/seconds/errors",
    "collection/failures/completion_len",
    "collection/failures/completion_len/errors",
    "collection/failures/reward",
    "collection/failures/reward/errors",
)
"""Metrics that the findings use."""


def findings(steps: Sequence[StepMetrics], run: Path, *, has_ended: bool = False) -> list[Finding]:
    """Return the problems that a run, in the directory `run`, has at the end of `steps`.

    Problems that prevent learning come first, then biased sampling. Steps without a recorded batch are
    skipped. A run that `has_ended` after fewer than three steps is judged by these.
    """
    batch_steps = _batch_steps(steps)
    return [*_hindrances(batch_steps, run, has_ended=has_ended), *_biases(batch_steps, run)]


def _with_rollback_advice(found: Finding, batch_steps: Sequence[StepMetrics], run: Path) -> Finding:
    """Add rollback advice to the finding of a policy that collapsed during training, or lost its reward."""
    before = [step for step in batch_steps if step.number < found.since]
    if not before:
        return found
    if found.name == "none_solved" and _is_higher(before, batch_steps[len(before) :], _SURE_OF_BEST):
        lost = f"tasks were solved before: mean reward {_reward(before):.3f} until step {before[-1].number}"
        advice = (
            f"{lost}; if the replies got worse: {rollback_advice(run, found.since)}; if not: {found.advice}"
        )
        return replace(found, advice=advice)
    return replace(found, advice=rollback_advice(run, found.since)) if found.name in _COLLAPSES else found


def _hindrances(batch_steps: Sequence[StepMetrics], run: Path, *, has_ended: bool) -> list[Finding]:
    enough = max(1, min(ENOUGH, len(batch_steps))) if has_ended else ENOUGH
    both = (
        _no_spread(batch_steps, run, enough) or _cut_off(batch_steps, run),
        _moved_too_far(batch_steps, run),
    )
    return [_with_rollback_advice(one, batch_steps, run) for one in both if one is not None]


def explain_no_learning(
    steps: Sequence[StepMetrics], run: Path, *, is_known: Callable[[str], bool] = lambda cause: False
) -> str | None:
    """Return a sentence on why a run that ended with `steps` learned nothing; None if it did learn.

    The advice is left out if the cause is known.
    """
    batch_steps = _batch_steps(steps)
    found, lost = _hindrances(batch_steps, run, has_ended=True), _has_fallen(batch_steps)
    if not found or (_has_improved(batch_steps) and not lost):
        return None
    how = "the progress was lost" if lost else "nothing was learned"
    first = found[0]
    advice = "" if is_known(first.cause) else f"; {first.advice}. See: {first.command}"
    return f"{how} because {first.cause} (since step {first.since}){advice}"


def explain_no_spread(
    *, mean: float, std: float, solved: float, unsolved: float, truncated: float, alike: float, size: float
) -> str:
    """Return the name of the finding that explains why the rewards of no group differ.

    `mean` and `std` describe all rewards, and `size` is the mean size of a group. The other arguments are
    shares: of groups with all rollouts `solved` or all `unsolved`, of `truncated` replies, and of groups with
    identical (`alike`) rollouts.
    """
    if size <= 1.0:
        return "no_siblings"
    if solved >= NEARLY_ALL:
        return "all_solved"
    if alike > 0.5:
        return "collapsed"
    if std <= _EQUAL and mean > 0.0:
        return "constant_reward"
    if truncated >= NEARLY_ALL:
        return "truncated"
    if unsolved >= NEARLY_ALL or (std <= _EQUAL and mean <= 0.0):
        return "none_solved"
    return "no_spread"


_OF_UNTRAINED = ("truncated", "none_solved", "no_spread", "constant_reward")
"""Findings whose advice does not help an untrained model."""


def _unless_untrained(name: str, first: StepMetrics) -> str:
    """Return the name of a finding, or `untrained` if the first replies are random tokens."""
    is_random = (first.value("orchestrator/logprob/mean") or 0.0) <= RANDOM_LOGPROB
    return "untrained" if name in _OF_UNTRAINED and is_random else name


def _batch_steps(steps: Sequence[StepMetrics]) -> list[StepMetrics]:
    return [step for step in steps if step.value("orchestrator/reward/mean") is not None]


def _no_spread(batch_steps: Sequence[StepMetrics], run: Path, enough: int) -> Finding | None:
    """Return a finding if `enough` last batches have no differing rewards. None if the run has converged."""
    steps = _last(batch_steps, lambda step: step.value("orchestrator/batch/with_spread") == 0.0)
    if len(steps) < enough:
        return None
    rollouts, groups = _mean(steps, "batch/rollouts"), _mean(steps, "batch/groups")
    of_training = (
        "shaped_reward" if steps[-1].value("orchestrator/shaped_reward/mean") is not None else "reward"
    )
    mean, std = _mean(steps, f"{of_training}/mean"), _mean(steps, f"{of_training}/std")
    name = explain_no_spread(
        mean=mean,
        std=std,
        solved=_mean(steps, "batch/solve_all"),
        unsolved=_mean(steps, "batch/solve_none"),
        truncated=_mean(steps, "is_truncated/mean"),
        alike=_mean(steps, "batch/alike"),
        size=rollouts / groups if groups else math.nan,
    )
    was_cut_off = _is_cut_off(batch_steps[0])
    if name == "collapsed" and was_cut_off:
        name = "truncated"
    elif name == "truncated" and not was_cut_off:
        name = "endless"
    improved = _has_improved(batch_steps) and not _has_fallen(batch_steps)
    if (name == "all_solved" and len(steps) < len(batch_steps)) or (improved and std <= _EQUAL):
        return None  # the run has converged
    seen = (
        f"The batches of steps {_range(steps)} have no advantages: all rollouts of a task have the same "
        f"reward (mean {mean:.4f})"
    )
    return _finding(_unless_untrained(name, batch_steps[0]), steps, run, seen)


def _cut_off(batch_steps: Sequence[StepMetrics], run: Path) -> Finding | None:
    """Return a finding if nearly all replies of recent batches are truncated and the reward does not rise."""
    steps = _last(batch_steps, _is_cut_off)
    if len(steps) < ENOUGH or _has_improved(batch_steps):
        return None
    seen = f"{_mean(steps, 'is_truncated/mean'):.0%} of the rollouts of steps {_range(steps)} were cut off"
    if not math.isnan(length := _mean(steps, "completion_len/mean")):
        seen += f", after {length:.1f} tokens on average"
    name = _unless_untrained("truncated", batch_steps[0]) if _is_cut_off(batch_steps[0]) else "endless"
    return _finding(name, steps, run, seen)


def _is_cut_off(step: StepMetrics) -> bool:
    return (step.value("orchestrator/is_truncated/mean") or 0.0) >= NEARLY_ALL


def _moved_too_far(batch_steps: Sequence[StepMetrics], run: Path) -> Finding | None:
    """Return a finding if the trained policy has moved too far from the sampling policy.

    In recent training steps nearly all tokens were excluded, or the effective sample size was near 0. The
    latter must occur in two steps, because a single unlikely token can cause it.
    """
    trained = [step for step in batch_steps if step.value("trainer/trained_tokens")][-ENOUGH:]
    left_out_all = [step for step in trained if _left_out(step) >= NEARLY_ALL]
    of_no_effect = [step for step in trained if _ess(step) <= _LITTLE_ESS]
    far = left_out_all or of_no_effect
    if not left_out_all and len(of_no_effect) < 2:
        return None
    left_out, ess = max(map(_left_out, far)), min(map(_ess, far))
    seen = (
        f"In step {far[0].number} the policy was far from the one that sampled: {left_out:.0%} of the "
        f"tokens were excluded, effective sample size {ess:.2f}"
    )
    return _finding("moved_too_far", far, run, seen)


def _biases(batch_steps: Sequence[StepMetrics], run: Path) -> list[Finding]:
    """Return findings if dropped groups or failed rollouts differ from the others.

    Only the newest step is checked, because its values summarize the steps before it.
    """
    found = [
        _finding(name, batch_steps[-1:], run, f"{what} {_more_or_less(value)} {than}")
        for step in batch_steps[-1:]
        for kind, (name, what, than) in _BIASES.items()
        if (value := _sure_difference(step, kind, ("seconds", "completion_len"))) is not None
    ]
    for step in batch_steps[-1:]:
        spared = _sure_difference(step, "failures", ("reward",))
        if spared is not None and spared[1] < 0.0:
            seen = f"Groups without failed rollouts have a {-spared[1]:.0%} lower reward than all groups"
            found.append(_finding("biased_failures", batch_steps[-1:], run, seen))
    return found


_BIASES = {
    "bias": ("biased", "The trained rollouts are", "than all sampled rollouts"),
    "failures": ("biased_failures", "Rollouts without an error are", "than all rollouts"),
}


def _sure_difference(step: StepMetrics, kind: str, measures: Sequence[str]) -> tuple[str, float] | None:
    """Return the first measure with a significant difference between kept and all rollouts.

    The result is the name of the measure and the relative difference. Requires four standard errors, since
    many steps are tested.
    """
    for measure in measures:
        name = f"orchestrator/collection/{kind}/{measure}"
        relative, errors = step.value(name), step.value(f"{name}/errors")
        if relative is None or errors is None:
            continue
        if abs(errors) >= _SURE_OF_BEST and abs(relative) >= _SMALL_BIAS:
            return measure, relative
    return None


def _more_or_less(found: tuple[str, float]) -> str:
    measure, relative = found
    return f"{abs(relative):.0%} {'longer' if relative > 0 else 'shorter'} ({measure})"


def _finding(name: str, steps: Sequence[StepMetrics], run: Path, seen: str) -> Finding:
    values = {key: [v for step in steps if (v := step.value(key)) is not None] for key in FINDING_METRICS}
    return Finding(
        name=name,
        since=steps[0].number,
        until=steps[-1].number,
        seen=seen,
        figures={key: statistics.fmean(found) for key, found in values.items() if found},
        cause=cause_of(name),
        advice=advice_of(name, {"RUN": quoted(run), "N": str(steps[-1].number)}),
        command=f"buckeye rl rollouts {quoted(run)} --step {steps[-1].number}",
    )


def _has_improved(batch_steps: Sequence[StepMetrics]) -> bool:
    """Return True if the reward of the last batches is significantly higher than that of the first one."""
    return len(batch_steps) > ENOUGH and _is_higher(batch_steps[-ENOUGH:], batch_steps[:1])


def _has_fallen(batch_steps: Sequence[StepMetrics]) -> bool:
    """Return True if the reward had risen and is now significantly lower than its earlier best."""
    windows = [batch_steps[end - ENOUGH : end] for end in range(ENOUGH, len(batch_steps) - ENOUGH + 1)]
    if not windows:
        return False
    best = max(windows, key=_reward)
    return all(_is_higher(best, others, _SURE_OF_BEST) for others in (batch_steps[-ENOUGH:], batch_steps[:1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Highest mean `reward` of a run, at `step`, and its mean reward at the end, `last`."""

    step: int
    reward: float
    last: float


def find_fall(batch_steps: Sequence[StepMetrics], *, least: int = ENOUGH) -> Peak | None:
    """Return the peak of a reward that fell afterward by a fifth and half of what was gained, else None.

    The fall is significant: by five standard errors, because many windows are compared, or by three if the
    first window is the peak. Means are over `least` steps or more.
    """
    size = max(least, len(batch_steps) // 10)
    rewards = [reward for step in batch_steps if (reward := step.sampled_reward) is not None]
    if len(rewards) != len(batch_steps) or len(rewards) < 2 * size:
        return None
    sums = [0.0, *accumulate(rewards)]
    means = [(sums[end] - sums[end - size]) / size for end in range(size, len(rewards) + 1)]
    begin = max(range(len(means) - size), key=means.__getitem__)
    best, last, lowest = means[begin], means[-1], min(rewards[0], *means)
    windows = (batch_steps[begin : begin + size], batch_steps[-size:])
    limit = (_SURE_OF_PEAK if begin else _SURE_OF_FIRST) * math.hypot(*map(_error_of_groups, windows))
    if not best - last > max(limit, 0.2 * abs(best), 0.5 * (best - lowest), _EQUAL):
        return None
    return Peak(step=windows[0][-1].number, reward=best, last=last)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Mean reward of the `first` and of the `last` batches, and `half` of the interval of the change.

    The interval has about 95 %: two standard errors of independent groups. `solved` is the share of groups
    with all rollouts solved in the last batches.
    """

    first: float
    last: float
    half: float
    over: str
    solved: float
    steps: int

    @property
    def has_risen(self) -> bool:
        """True if the whole interval of the change is above 0."""
        return self.last - self.first > max(self.half, _EQUAL)

    @property
    def is_flat(self) -> bool:
        """True if the reward has not risen in ten steps or more, though tasks are left to solve."""
        return self.steps >= _ENOUGH_TO_RISE and not self.has_risen and self.solved < NEARLY_ALL

    def __str__(self) -> str:
        change = self.last - self.first
        return (
            f"reward {self.first:.3f} at first, {self.last:.3f} at last: {change:+.3f} "
            f"({change - self.half:+.3f} to {change + self.half:+.3f}; {self.over})"
        )


def outcome_of(steps: Sequence[StepMetrics]) -> Outcome | None:
    """Return the outcome of a run; None without two batches."""
    batch_steps = _batch_steps(steps)
    if len(batch_steps) < 2:
        return None
    size = max(1, min(10, len(batch_steps) // 3))
    first, last = batch_steps[:size], batch_steps[-size:]
    over = f"steps {first[0].number} to {last[-1].number}"
    solved = _mean(last, "batch/solve_all")
    if solved == 1.0:
        over += ", every task solved"
    half = _SURE * math.hypot(_error_of_groups(first), _error_of_groups(last))
    return Outcome(
        first=_reward(first), last=_reward(last), half=half, over=over, solved=solved, steps=len(batch_steps)
    )


def _error_of_groups(steps: Sequence[StepMetrics]) -> float:
    """Return the standard error of the mean reward of steps.

    It is the larger one of the error from the spread of rewards among groups, and of that among steps.
    """
    groups = max(1.0, sum(step.value("orchestrator/batch/groups") or 0.0 for step in steps))
    rewards = [reward for step in steps if (reward := step.sampled_reward) is not None]
    among_steps = statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0
    within = _mean(steps, "reward/std") / math.sqrt(groups)
    return max(among_steps, 0.0 if math.isnan(within) else within)


def _is_higher(these: Sequence[StepMetrics], others: Sequence[StepMetrics], errors: float = _SURE) -> bool:
    """Return True if the mean reward is higher by `errors` standard errors of independent rollouts."""
    error = math.hypot(*(_mean(steps, "reward/std") / math.sqrt(_count(steps)) for steps in (these, others)))
    return _reward(these) - _reward(others) > max(errors * error, _EQUAL)


def _reward(steps: Sequence[StepMetrics]) -> float:
    values = [reward for step in steps if (reward := step.sampled_reward) is not None]
    return statistics.fmean(values) if values else math.nan


def _count(steps: Sequence[StepMetrics]) -> float:
    return max(1.0, sum(step.value("orchestrator/batch/rollouts") or 0.0 for step in steps))


def _mean(steps: Sequence[StepMetrics], name: str) -> float:
    """Return the mean of an orchestrator metric, or nan if it is not recorded."""
    values = [v for step in steps if (v := step.value(f"orchestrator/{name}")) is not None]
    return statistics.fmean(values) if values else math.nan


def _ess(step: StepMetrics) -> float:
    value = step.value("trainer/effective_sample_size")
    return 1.0 if value is None else value


def _left_out(step: StepMetrics) -> float:
    return sum(step.value(f"trainer/{name}") or 0.0 for name in ("masked_low", "masked_high"))


def _last(steps: Sequence[StepMetrics], holds: Callable[[StepMetrics], bool]) -> list[StepMetrics]:
    """Return the last consecutive steps that satisfy `holds`, in order."""
    return list(takewhile(holds, reversed(steps)))[::-1]


def _range(steps: Sequence[StepMetrics]) -> str:
    return f"{steps[0].number} to {steps[-1].number}"
