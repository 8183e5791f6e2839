"""Progress display of a run: each step with the reward of the same step."""

import io
import re

import pytest
from hypothesis import given

from buckeye.launch.progress import Progress
from tests.monitor.test_metrics import counted_by_hand, record, runs, written
from tests.run.made_runs import write_metrics
from tests.run.preflight.test_forecast import SECOND, measured


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def shown(tmp_path):
    """Return `shown(*records, ended=False)`, which returns printed steps, current step and trained count."""
    stream = io.StringIO()
    progress = Progress(tmp_path / "metrics.jsonl", max_steps=20, stream=stream)

    def show(*records, ended=False):
        stream.truncate(stream.seek(0))
        write_metrics(tmp_path, *((r["process"], r["step"], 0, r) for r in records))
        progress.update("waiting", ended=ended)
        found = re.findall(r"(Step \d+/20)(?:.*?( \| reward [0-9.]+))?", stream.getvalue())
        return ["".join(parts) for parts in found], progress.step, progress.trained

    return show


def batch(step, reward, attempt=1):
    return record("orchestrator", step, attempt, **{"reward/mean": reward})


def test_progress_shows_each_step_with_its_own_reward(shown):
    assert shown(batch(0, 0.1), batch(1, 0.2), batch(2, 0.3)) == ([], 0, 0)
    assert shown(record("trainer", 0)) == (["Step 1/20 | reward 0.1000"], 1, 1)
    assert shown(batch(3, 0.4), record("trainer", 1), record("trainer", 2)) == (
        ["Step 2/20 | reward 0.2000", "Step 3/20 | reward 0.3000"],
        3,
        3,
    )


def test_progress_waits_for_the_batch_of_a_trained_step(shown):
    assert shown(batch(0, 0.1), record("trainer", 0), record("trainer", 1)) == (
        ["Step 1/20 | reward 0.1000"],
        2,
        2,
    )
    assert shown(batch(1, 0.2)) == (["Step 2/20 | reward 0.2000"], 2, 2)
    assert shown(record("trainer", 2)) == ([], 3, 3)
    assert shown(batch(3, 0.4), record("trainer", 3)) == (["Step 3/20", "Step 4/20 | reward 0.4000"], 4, 4)
    assert shown(record("trainer", 4), batch(6, 0.5)) == ([], 5, 5)
    assert shown(ended=True) == (["Step 5/20"], 5, 5)


def test_progress_shows_repeated_step_again(shown):
    assert shown(batch(0, 0.1), batch(1, 0.2), record("trainer", 0), record("trainer", 1))[1:] == (2, 2)
    assert shown(batch(2, 0.3), batch(1, 0.25, 2)) == ([], 2, 2)
    assert shown(record("trainer", 1, 2)) == (["Step 2/20 | reward 0.2500"], 2, 3)
    assert shown(batch(2, 0.35, 2), record("trainer", 2, 2)) == (["Step 3/20 | reward 0.3500"], 3, 4)


@given(lines=runs())
def test_progress_never_mixes_rewards_of_steps(tmp_path_factory, lines):
    folder, stream = tmp_path_factory.mktemp("run"), io.StringIO()
    progress = Progress(folder / "metrics.jsonl", max_steps=None, stream=stream)
    for line in lines:
        if line is not None:
            new = written(line)
            write_metrics(folder, (new["process"], new["step"], 0, new))
            progress.update("")
    progress.update("", ended=True)
    found = re.findall(r"^Step (\d+)(?: \| reward (\d)\.(\d\d)00)?", stream.getvalue(), re.MULTILINE)
    assert len(found) <= sum(line is not None and line[1] == "trainer" for line in lines)
    assert all(not shown or int(shown) == int(done) - 1 for done, _, shown in found)
    last = {int(done) - 1: int(attempt or 0) for done, attempt, _ in found}
    counts = counted_by_hand(lines)
    trained = [step for step, process in counts if process == "trainer"]
    assert {step: last[step] for step in trained} == {n: counts.get((n, "orchestrator"), 0) for n in trained}


def test_live_line_shows_newest_step_within_terminal_width(tmp_path, monkeypatch):
    monkeypatch.setattr("buckeye.launch.progress._columns", lambda: 40)
    stream = Terminal()
    progress = Progress(tmp_path / "metrics.jsonl", max_steps=9, stream=stream)
    progress.update("waiting")
    assert stream.getvalue() == "\r\x1b[2K0 s | waiting"
    numbers = {"reward/mean": 0.5, "perf/throughput": 4577.7, "batch/off_policy_level/max": 1}
    write_metrics(tmp_path, ("orchestrator", 0, 0, numbers), ("trainer", 0, 0, {"loss": -0.25}))
    line = "0 s | Step 1/9 | reward 0.5000 | loss -0.2500 | 4,578 tokens/s | staleness 1"
    progress.update("")
    assert stream.getvalue().endswith(f"\r\x1b[2K{line[:39]}")
    monkeypatch.setattr("buckeye.launch.progress._columns", lambda: 100)
    progress.update("")
    assert stream.getvalue().endswith(f"\r\x1b[2K{line}")


def test_remaining_time_follows_recent_steps(tmp_path, monkeypatch):
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr("buckeye.launch.progress.time.monotonic", lambda: now[0])
    progress = Progress(tmp_path / "metrics.jsonl", max_steps=10, stream=stream)
    for step, seconds in enumerate((100.0, 110.0, 130.0)):
        now[0] = seconds
        write_metrics(tmp_path, ("orchestrator", step, 0, {}), ("trainer", step, 0, {}))
        progress.update("")
    # 10 s for the second step, 30 s for two; the first is not counted, because it includes the start
    assert stream.getvalue().splitlines() == ["Step 1/10", "Step 2/10 | 80 s left", "Step 3/10 | 2 min left"]


def test_remaining_time_is_that_of_the_corrected_forecast(tmp_path):
    """The steps after the first took 2 and 4 times the forecast second, and 1 s each outside of it."""
    stream = io.StringIO()
    progress = Progress(tmp_path / "metrics.jsonl", max_steps=13, forecast=SECOND, stream=stream)
    for step, seconds in enumerate((50.0, 2.0, 4.0)):
        trained = measured(seconds, seconds + 1, 1000, 1.0)
        write_metrics(tmp_path, ("orchestrator", step, 0, {}), ("trainer", step, 0, trained))
    progress.update("")
    assert stream.getvalue().splitlines()[-1] == "Step 3/13 | 40 s left"


def test_first_trained_steps_exclude_steps_without_tokens(tmp_path):
    progress = Progress(tmp_path / "metrics.jsonl", max_steps=10, stream=io.StringIO())
    for step, tokens in enumerate((0.0, 7.0, 8.0, 0.0, 9.0, 10.0)):
        write_metrics(tmp_path, ("trainer", step, 0, {"tokens_computed": tokens}))
    progress.update("")
    assert [step["tokens_computed"] for step in progress.first_trained] == [7.0, 8.0, 9.0]


@pytest.mark.parametrize(("terminal", "is_live"), [("xterm", True), ("dumb", False)])
def test_dumb_terminal_gets_no_escape_codes(tmp_path, monkeypatch, terminal, is_live):
    monkeypatch.setenv("TERM", terminal)
    stream = Terminal()
    progress = Progress(tmp_path / "metrics.jsonl", max_steps=20, stream=stream)
    write_metrics(tmp_path, *((r["process"], r["step"], 0, r) for r in (batch(0, 0.1), record("trainer", 0))))
    progress.update("waiting")
    assert ("\x1b" in stream.getvalue()) == is_live
    assert "Step 1/20" in stream.getvalue()
