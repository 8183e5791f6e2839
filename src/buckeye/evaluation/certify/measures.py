"""Checks of a certificate that run sessions in separate worker processes."""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from buckeye.base.columns import counted
from buckeye.base.process import usable_cores
from buckeye.envs.base import Environment, Probe, Task, required_tasks
from buckeye.envs.settings import WorkerSettings
from buckeye.evaluation.certify.resources import (
    ROUNDS,
    Measurement,
    find_leaks,
    measure_resources,
    processor_seconds,
    rounded,
    separate_temporary_folder,
    waiting_seconds,
)
from buckeye.evaluation.certify.sessions import (
    MAX_TURNS,
    PLANNED_TASKS,
    Difference,
    Plan,
    PlannedPolicy,
    Session,
    first_difference,
    make_hard_plans,
    make_plans,
    run_session,
    run_sessions,
)
from buckeye.evaluation.checks.result import shortened
from buckeye.evaluation.env_check import CheckOptions
from buckeye.workers.environment import WorkerEnvironment
from buckeye.workers.loading import open_environment

_MAX_PLANS = 100
_MIN_SECONDS = 20.0
_SHARES = {"one by one": 0.25, "again": 0.6, "without a part of the reply": 0.75, "side by side": 2.0}
"""Deadline of each phase, relative to the budget."""
_PAUSES = (0.37, 0.23)
"""Pauses between later sessions, in each process: different, so that a clock shows."""
_LATER_SESSIONS = 6
_CANCEL_SECONDS = 3.0
_LATE_AFTER, _REPLY_AFTER, _LATE_SESSIONS = 1.0, 2.0, 4
_MAX_REPETITIONS = 4
_GRADING_SECONDS = 10.0
_PACE, _PACED_SESSIONS = 0.05, 8
_MIN_SPEEDUP = 0.55
"""Minimum speedup of sessions side by side, as a share of the possible one."""
_REPLY_PART = re.compile(r"<([A-Za-z]\w*)>.*?</\1>|[^\n.]+[\n.]?", re.DOTALL)
_NO_TIME = "out of time (raise --budget)"


@dataclass(slots=True)
class _Bench:
    """Two workers of an environment, and what their sessions have shown.

    `reference` are the comparable sessions that the first worker ran one by one. `unstable` are differences
    between two processes. `shared` are differences after other sessions, or next to them.
    """

    workers: tuple[WorkerEnvironment, WorkerEnvironment]
    started: float
    budget: float
    progress: Callable[[str], None]
    reference: list[Session] = field(default_factory=list)
    unstable: list[Difference] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    repeated: int = 0
    finished: int = 0
    lost: int = 0
    at_once: int = 1
    resources: list[dict[str, float]] = field(default_factory=list)

    def deadline(self, phase: str) -> float:
        """Report the phase, and return its deadline."""
        self.progress(f"sessions {phase}")
        return self.started + _SHARES[phase] * self.budget

    @property
    def plans(self) -> list[Plan]:
        return [session.plan for session in self.reference]


async def measure_sessions(
    env_id: str,
    args: Mapping[str, Any],
    settings: WorkerSettings,
    probes: Sequence[Probe],
    sessions: int,
    options: CheckOptions,
) -> tuple[list[Measurement], list[Session]]:
    """Run sessions in two new worker processes, `sessions` of them side by side.

    Return the checks, and the sessions that ran one by one. They take at most 40 seconds, or twice
    the budget of `options`.
    """
    settings = replace(settings, isolation="process", max_turns=MAX_TURNS, cancel_timeout=_CANCEL_SECONDS)
    with separate_temporary_folder() as temporary:
        opened = await asyncio.gather(
            *(asyncio.to_thread(open_environment, env_id, args, settings) for _ in range(2))
        )
        workers = [environment for environment in opened if isinstance(environment, WorkerEnvironment)]
        try:
            tasks = _first_tasks(workers[0])
            plans = make_plans(tasks, probes, min(sessions, _MAX_PLANS))
            for each in workers:  # imports and first connections
                await run_session(each, PlannedPolicy(plans[0]))
            budget = max(options.budget, _MIN_SECONDS)
            bench = _Bench((workers[0], workers[1]), time.monotonic(), budget, options.progress)
            checks = await _measure(bench, plans, sessions, temporary)
            if bench.reference:
                options.progress("replies that are hard to grade")
                checks.append(await _check_grading_time(workers[1], make_hard_plans(tasks, probes)))
            return checks, bench.reference
        finally:
            for environment in workers:
                await environment.close()


async def _measure(bench: _Bench, plans: Sequence[Plan], count: int, temporary: Path) -> list[Measurement]:
    cost = await _run_reference(bench, plans)
    if not bench.reference:
        return [cost]
    await _run_again(bench)
    concurrency = await _check_concurrency(bench)
    components = await _check_components(bench)
    await _run_side_by_side(bench, count, temporary)
    bench.progress("sessions with late replies")
    timeouts = await _check_timeouts(bench)
    return [
        _check_determinism(bench),
        _check_isolation(bench, count),
        *find_leaks(bench.resources, bench.at_once),
        concurrency,
        timeouts,
        cost,
        components,
    ]


async def _run_reference(bench: _Bench, plans: Sequence[Plan]) -> Measurement:
    """Run the plans one by one, and return the cost of a session."""
    worker, deadline = bench.workers[0], bench.deadline("one by one")
    used, began = processor_seconds(worker), time.monotonic()
    done = _ended(await run_sessions(worker, plans, at_once=1, deadline=deadline))
    seconds, used = time.monotonic() - began, processor_seconds(worker) - used
    bench.reference = [session for session in done if session.is_comparable]
    if not bench.reference:
        reason = f"no session ended: {done[0].outcome.error}" if done else _NO_TIME
        return Measurement("sessions", "fail" if done else "not run", reason)
    measured = {
        "processor_ms": rounded(1000 * used / len(done)),
        "wall_ms": rounded(1000 * seconds / len(done)),
        "turns": rounded(statistics.fmean(len(session.replies) for session in done)),
        "cores": usable_cores(),
        "load": rounded(os.getloadavg()[0]),
    }
    detail = "{processor_ms:g} ms of processor, {wall_ms:g} ms one by one, {turns:g} turns per session"
    return Measurement("cost", "pass", detail.format(**measured), measured)


async def _run_again(bench: _Bench) -> None:
    """Repeat the sessions in the second process, and run some again in both, with pauses.

    Both processes run the same sessions in the same order. So a session that differs between them does not
    depend on other sessions, and one that only differs from its first run does.
    """
    deadline = bench.deadline("again")
    second = await run_sessions(bench.workers[1], bench.plans, at_once=1, deadline=deadline)
    plans = (bench.plans * _LATER_SESSIONS)[:_LATER_SESSIONS]
    later: list[list[Session | None]] = []
    for worker, pause in zip(bench.workers, _PAUSES, strict=True):
        later.append([])
        for plan in plans:
            await asyncio.sleep(pause)
            later[-1] += await run_sessions(worker, [plan], at_once=1, deadline=deadline)
    pairs = [*zip(bench.reference, second, strict=True), *zip(*later, strict=True)]
    bench.unstable, bench.repeated = _differences(pairs)
    after, _ = _differences(list(zip(bench.reference * _LATER_SESSIONS, later[0], strict=False)))
    bench.shared = [f"after other sessions: {difference.text}" for difference in after]


def _differences(pairs: Sequence[tuple[Session | None, Session | None]]) -> tuple[list[Difference], int]:
    """Return the differences, and the number of compared pairs."""
    compared = [
        (one, other)
        for one, other in pairs
        if one is not None and other is not None and one.is_comparable and other.is_comparable
    ]
    return [found for pair in compared if (found := first_difference(*pair)) is not None], len(compared)


def _check_determinism(bench: _Bench) -> Measurement:
    name, compared, differ = "determinism", bench.repeated, len(bench.unstable)
    measured = {"sessions": compared, "differ": differ}
    if not compared:
        return Measurement(name, "not run", _NO_TIME, measured)
    if not differ:
        return Measurement(name, "pass", f"{counted(compared, 'session')} equal in two processes", measured)
    worst = next((d for d in bench.unstable if d.kind != "component"), bench.unstable[0])
    detail = f"{differ} of {compared} sessions differ in a {worst.kind}; {worst.text}"
    return Measurement(name, "warn" if worst.kind == "component" else "fail", detail, measured)


async def _run_side_by_side(bench: _Bench, count: int, temporary: Path) -> None:
    """Run `count` sessions in rounds side by side. If a resource grows, run as many again, several times."""
    deadline = bench.deadline("side by side")
    bench.at_once = max(1, -(-count // ROUNDS))
    worker, reference = bench.workers[0], bench.reference
    for _ in range(_MAX_REPETITIONS):
        for start in range(0, count, bench.at_once):
            chosen = [reference[(start + i) % len(reference)] for i in range(bench.at_once)]
            plans = [session.plan for session in chosen]
            done = await run_sessions(worker, plans, at_once=len(plans), deadline=deadline)
            if None in done:
                return
            found, compared = _differences(list(zip(chosen, done, strict=True)))
            bench.shared += [f"side by side: {difference.text}" for difference in found]
            bench.finished += compared
            bench.lost += len(done) - compared
            await asyncio.sleep(0.05)  # until cancelled tasks and connections have ended
            bench.resources.append(await measure_resources(worker, temporary))
        if all(check.verdict == "pass" for check in find_leaks(bench.resources, bench.at_once)):
            return


def _check_isolation(bench: _Bench, count: int) -> Measurement:
    name, done, differ = "isolation", bench.finished, len(bench.shared)
    measured = {"sessions": done, "at_once": bench.at_once, "differ": differ, "lost": bench.lost}
    if bench.unstable or not done:
        reason = "sessions differ already one by one" if bench.unstable else _NO_TIME
        return Measurement(name, "not run", reason, measured)
    if differ:
        return Measurement(name, "fail", f"{counted(differ, 'difference')} {bench.shared[0]}", measured)
    detail = f"{counted(done, 'session')}, {bench.at_once} side by side, with the results of one by one"
    if bench.lost:
        detail += f"; {bench.lost} ended with an error of the machine or the time"
    elif done < count:
        detail += f"; no time for {count - done}"
    return Measurement(name, "warn" if bench.lost else "pass", detail, measured)


async def _check_concurrency(bench: _Bench) -> Measurement:
    """Compare the time of sessions one by one and side by side, with replies that take time."""
    name, deadline, plans = "concurrency", bench.deadline("side by side"), bench.plans[:_PACED_SESSIONS]
    worker, seconds = bench.workers[1], list[float]()
    used = processor_seconds(worker) + waiting_seconds(worker) + time.process_time()
    for at_once in (1, len(plans), len(plans)):
        began = time.monotonic()
        done = await run_sessions(worker, plans, at_once=at_once, deadline=deadline, seconds=_PACE)
        seconds.append(time.monotonic() - began)
        if None in done:
            return Measurement(name, "not run", _NO_TIME)
    used = (processor_seconds(worker) + waiting_seconds(worker) + time.process_time() - used) / len(seconds)
    speedup = seconds[0] / min(seconds[1:])  # another program may slow one of them down
    possible = seconds[0] / max(used, seconds[0] / len(plans))
    measured = {"side_by_side": len(plans), "speedup": rounded(speedup), "possible": rounded(possible)}
    detail = f"{len(plans)} sessions are {speedup:.1f} times as fast side by side, {possible:.1f} possible"
    if len(plans) > 1 and speedup < max(1.0, _MIN_SPEEDUP * possible):
        return Measurement(name, "warn", f"{detail}: a session blocks the others", measured)
    return Measurement(name, "pass", detail, measured)


async def _check_timeouts(bench: _Bench) -> Measurement:
    """Cancel sessions that wait for a late reply. Their worker must continue, and run the next session."""
    name, worker, plan = "timeouts", bench.workers[1], bench.plans[0]
    before, policies = worker.workers(), [PlannedPolicy(plan, _REPLY_AFTER) for _ in range(_LATE_SESSIONS)]
    ended = await asyncio.gather(*(run_session(worker, policy, _LATE_AFTER) for policy in policies))
    cancelled = sum(session.outcome.boundary == "timeout" for session in ended)
    await asyncio.sleep(_CANCEL_SECONDS + 0.5)
    measured = {"sessions": _LATE_SESSIONS, "cancelled": cancelled}
    if not any(policy.read for policy in policies):
        return Measurement(name, "not run", f"no request within {_LATE_AFTER:g} s", measured)
    if worker.workers() != before:
        detail = f"a cancelled session does not end within {_CANCEL_SECONDS:g} s; its worker was replaced"
        return Measurement(name, "fail", detail, measured)
    following = await run_session(worker, PlannedPolicy(plan))
    difference = first_difference(bench.reference[0], following)
    if difference is not None and not bench.unstable and not bench.shared:
        detail = f"a session after a cancelled one differs; {difference.text}"
        return Measurement(name, "fail", detail, measured)
    detail = f"{counted(cancelled, 'session')} with late replies cancelled; the next session is equal"
    return Measurement(name, "pass", detail, measured)


async def _check_grading_time(worker: WorkerEnvironment, plans: Sequence[Plan]) -> Measurement:
    """Run sessions with texts that a careless regular expression needs exponential time for."""
    name, longest = "grading time", 0.0
    for plan in plans:
        began = time.monotonic()
        session = await run_session(worker, PlannedPolicy(plan), _GRADING_SECONDS)
        longest = max(longest, time.monotonic() - began)
        if session.outcome.boundary == "timeout":
            reply = shortened(plan.first, 60)
            return Measurement(name, "fail", f"reply {reply!r} is not graded within {_GRADING_SECONDS:g} s")
    measured = {"sessions": len(plans), "longest_ms": rounded(1000 * longest)}
    detail = f"at most {measured['longest_ms']:g} ms for a session with a reply that is hard to grade"
    return Measurement(name, "pass", detail, measured)


async def _check_components(bench: _Bench) -> Measurement:
    """Search for a reply whose reward rises when a part of the reply, and with it a component, is missing."""
    name, deadline = "components", bench.deadline("without a part of the reply")
    single = [session for session in bench.reference if len(session.replies) == 1]
    best = sorted(single, key=lambda session: -(session.outcome.reward or 0.0))[:20]
    plans = [replace(s.plan, first=less) for s in best for less in _without_parts(s.plan.first)]
    done = await run_sessions(bench.workers[1], plans, at_once=8, deadline=deadline)
    scored = [s for s in (*bench.reference, *_ended(done)) if s.outcome.reward is not None]
    names = {component for session in scored for component in session.outcome.components}
    measured = {"sessions": len(scored), "components": len(names)}
    if not names:
        return Measurement(name, "not run", "outcomes have no components", measured)
    for one, other in combinations(scored, 2):
        for full, less in ((one, other), (other, one)):
            if missing := _missing_component(full, less):
                detail = (
                    f"{full.plan.task.id}: reward {full.outcome.reward:g} with {missing}, "
                    f"{less.outcome.reward:g} without it, for reply {shortened(less.plan.first, 60)!r}"
                )
                return Measurement(name, "warn", detail, measured)
    detail = f"no missing component raises the reward of {counted(len(scored), 'session')}"
    return Measurement(name, "pass", detail, measured)


def _missing_component(full: Session, less: Session) -> str | None:
    """Return a component of `full` that `less` lacks, if `less` has a higher reward for nothing better.

    Without a negative component, such as a penalty, the reward may rise.
    """
    if full.plan.task.id != less.plan.task.id:
        return None
    first, second = full.outcome.components, less.outcome.components
    missing = [name for name in first if name not in second]
    is_no_better = all(first.get(name, -1.0) >= value for name, value in second.items())
    rises = (less.outcome.reward or 0.0) > (full.outcome.reward or 0.0) + 1e-9
    if not missing or not rises or not is_no_better or min(first[name] for name in missing) < 0:
        return None
    return missing[0]


def _without_parts(reply: str) -> list[str]:
    """Return the reply without each of its tagged sections, lines and sentences."""
    parts = [match[0] for match in _REPLY_PART.finditer(reply)]
    return [reply.replace(part, "", 1) for part in dict.fromkeys(parts)][:8] if len(parts) > 1 else []


def _first_tasks(environment: Environment) -> list[Task]:
    """Return the first tasks of all splits, in turn."""
    splits = [required_tasks(environment, split)[:PLANNED_TASKS] for split in environment.splits]  # type: ignore[attr-defined]
    return [tasks[index] for index in range(PLANNED_TASKS) for tasks in splits if index < len(tasks)]


def _ended(sessions: Sequence[Session | None]) -> list[Session]:
    return [session for session in sessions if session is not None]
