"""Who may write to a run directory, and what is deleted or put away in it."""

import errno
import json
import logging
import os

import pytest

from buckeye.errors import UsageError
from buckeye.run.directory import (
    attempt_logs,
    begin_attempt,
    claimed,
    clean,
    earlier_logs,
    link_log,
    locked,
)


@pytest.fixture(autouse=True)
def _no_run(monkeypatch):
    for name in ("RANK", "BUCKEYE_RUN_ID", "BUCKEYE_ATTEMPT"):
        monkeypatch.setenv(name, "0")


def _start(directory, work):
    with claimed(directory, resumed=False, resume_command="sft --ckpt.resume-step -1"):
        (directory / "configs").mkdir(exist_ok=True)
        (directory / "configs" / "sft.json").write_text("{}")
        work()


def test_a_start_that_failed_before_the_first_step_is_no_dead_end(tmp_path):
    def fail():
        raise UsageError("chats.jsonl: no such file")

    for _ in range(2):
        with pytest.raises(UsageError, match="no such file"):
            _start(tmp_path, fail)
    _start(tmp_path, lambda: (tmp_path / "metrics.jsonl").write_text("{}"))
    assert json.loads((tmp_path / "run.json").read_text())["attempt"] == 3
    with pytest.raises(UsageError, match="already holds a run") as refused:
        _start(tmp_path, lambda: None)
    assert "--clean" not in str(refused.value)  # which only rl has
    assert "sft --ckpt.resume-step -1" in str(refused.value)


@pytest.mark.parametrize("left", ["checkpoints/step_1", "weights/step_1", "status.json"])
def test_what_was_trained_is_not_written_over(tmp_path, left):
    (tmp_path / left).mkdir(parents=True)
    with pytest.raises(UsageError, match="already holds a run"):
        _start(tmp_path, lambda: None)


def test_clean_leaves_nothing_of_the_run(tmp_path):
    begin_attempt(tmp_path, resumed_step=None)
    for name in ("exports/step_4/README.md", "skipped/step_2/b", "weights/step_1/m", "notes.txt", "mine/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "notes.txt"]


def test_clean_that_was_killed_can_be_repeated(tmp_path, monkeypatch):
    begin_attempt(tmp_path, resumed_step=None)
    (tmp_path / "weights" / "step_1").mkdir(parents=True)

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            clean(tmp_path)
    clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_a_warning_and_no_other_run(tmp_path, monkeypatch, caplog):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    monkeypatch.setattr(logging.getLogger("buckeye"), "propagate", True)
    with locked(tmp_path):
        assert "has no locks" in caplog.text


def test_a_log_of_an_earlier_version_is_put_away_and_not_replaced(tmp_path):
    logs = tmp_path / "logs"
    for attempt in (2, 3):
        attempt_logs(tmp_path, attempt).mkdir(parents=True)
    (logs / "trainer.stdout").write_text("of attempt 1")
    for attempt in (2, 3):
        (attempt_logs(tmp_path, attempt) / "trainer.stdout").write_text(f"of attempt {attempt}")
        link_log(tmp_path, attempt, "trainer.stdout")
        assert (logs / "trainer.stdout").read_text() == f"of attempt {attempt}"
    assert (logs / "attempt_1" / "trainer.stdout").read_text() == "of attempt 1"
    assert [path.name for path in earlier_logs(tmp_path)] == ["attempt_1", "attempt_2"]
