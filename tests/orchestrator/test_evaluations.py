"""Schedule of evaluated versions, also after an interruption."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.base.process import RunIdentity
from buckeye.config.orchestrator import EvalConfig, EvalEnvConfig, OrchestratorConfig
from buckeye.monitor.metrics import MetricsLog
from buckeye.orchestrator import evaluation_schedule as module
from buckeye.orchestrator import loop
from buckeye.orchestrator.evaluation_schedule import EvaluationSchedule

from .made_rollouts import group, rollout
from .test_weights_watcher import publish

ME = RunIdentity(run_id="mine", attempt=2)


def made(tmp_path, *, start=0, last=12, interval=3, base=True, level=1, done=()):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for version in done:
        log.write("eval", version, {})
    config = OrchestratorConfig(
        eval=EvalConfig(env=[EvalEnvConfig(id="letters")], interval=interval, eval_base_model=base),
        max_steps=last,
        max_async_level=level,
        output_dir=tmp_path,
    )
    return EvaluationSchedule(config, [], log, ME, start_step=start, make_runner=None)


def measured(evaluations, monkeypatch, *, to):
    """Return the steps that are evaluated while the engines receive one version after another."""
    found = []

    async def evaluate(environments, player, *, measured, **settings):
        found.append(measured["step"])
        return []

    monkeypatch.setattr(module, "evaluate_all", evaluate)
    evaluations._make_runner = lambda purpose, version, params: None
    watcher = SimpleNamespace(version=0)

    async def reach(version, timeout):
        while watcher.version < version:
            await asyncio.sleep(0.001)

    async def run():
        watcher.wait_for_version = reach
        running = asyncio.create_task(evaluations.run(watcher))
        for version in range(to + 1):
            watcher.version = version
            await evaluations.wait_until_evaluated(version, watcher)
        running.cancel()

    asyncio.run(run())
    return found


@pytest.mark.parametrize(
    ("settings", "versions"), [({}, [0, 3, 6, 9, 12]), ({"base": False, "last": 10}, [3, 6, 9, 10])]
)
def test_due_versions_are_every_interval_and_the_last(tmp_path, monkeypatch, settings, versions):
    assert measured(made(tmp_path, **settings), monkeypatch, to=versions[-1]) == versions


def test_nothing_is_due_without_evaluations(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    nothing = EvaluationSchedule(OrchestratorConfig(), [], log, ME, start_step=0, make_runner=None)
    assert nothing.due is None
    asyncio.run(nothing.wait_until_evaluated(9, None))


@given(
    interval=st.integers(1, 7),
    last=st.none() | st.integers(0, 20),
    start=st.integers(0, 20),
    done=st.sets(st.integers(0, 20)),
)
def test_due_is_the_first_version_that_is_not_evaluated(tmp_path_factory, interval, last, start, done):
    evaluations = made(
        tmp_path_factory.mktemp("run"), start=start, last=last or None, interval=interval, done=done
    )
    end = max(last, start) if last else None
    expected = [v for v in range(start, (end or 50) + 1) if v % interval == 0 or v == end]
    left = [version for version in expected if version not in {d for d in done if d <= start}]
    assert evaluations.due == (left[0] if left else None)


def test_due_version_is_found_without_a_search(tmp_path):
    """The loop asks for it hundreds of times a second."""
    assert made(tmp_path, start=1, last=None, interval=10**15).due == 10**15


def test_interrupted_evaluation_runs_again_with_its_weights(tmp_path):
    """Training was at 7 while 6 was evaluated, and the run resumes from 7."""
    assert made(tmp_path, start=7).due == 9  # a run that begins to evaluate later does not catch up
    publish(tmp_path / "weights", 6, RunIdentity(run_id="mine", attempt=1))
    assert made(tmp_path, start=7, done=(0, 3)).due == 6
    assert made(tmp_path, start=7, done=(0, 3, 6)).due == 9


@pytest.mark.parametrize("whose", [None, "other"])
def test_missed_evaluation_without_weights_is_logged(tmp_path, caplog, whose, wording):
    if whose is not None:
        publish(tmp_path / "weights", 6, RunIdentity(run_id=whose, attempt=1))
    assert made(tmp_path, start=7, done=(0, 3)).due == 9
    assert caplog.messages[-1] == wording


def test_last_version_may_be_before_the_start_step(tmp_path):
    evaluations = made(tmp_path, start=4, last=None)
    assert evaluations.due == 6
    evaluations.last = 5
    assert evaluations.due == 5


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_only_deterministic_sampling_waits_for_an_evaluation(is_deterministic):
    """All else of the orchestrator ends at once."""
    orchestrator = MagicMock(turns=None, config=OrchestratorConfig())
    orchestrator.deterministic = object() if is_deterministic else None
    orchestrator.evaluations.wait_until_evaluated = wait = AsyncMock()
    orchestrator._collect = AsyncMock(return_value=SimpleNamespace(groups=[group(rollout(1.0))]))
    orchestrator._hand_over = AsyncMock(return_value={})
    orchestrator._report = AsyncMock()
    orchestrator.loop_watch.take_lateness.return_value = orchestrator.times.record.return_value = {}
    asyncio.run(loop.Orchestrator._step(orchestrator, 1, None, None))
    assert wait.await_count == is_deterministic
    assert orchestrator._report.await_count == 1
