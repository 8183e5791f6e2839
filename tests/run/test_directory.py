"""Exclusive access to a run directory, and the files that a start deletes or archives."""

import errno
import json
import logging
import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from buckeye.errors import UsageError
from buckeye.launch.supervisor import Supervisor
from buckeye.run_files.directory import (
    DirectoryLostError,
    begin_attempt,
    check_owner,
    check_unused,
    claim_directory,
    clean,
    files_of_a_run,
    is_in_use,
    lock_directory,
    move_unstarted_run,
)
from buckeye.run_files.record import RunRecord, write_record


@pytest.fixture(autouse=True)
def _no_run(monkeypatch):
    for name in ("RANK", "BUCKEYE_RUN_ID", "BUCKEYE_ATTEMPT"):
        monkeypatch.setenv(name, "0")


def _start(directory, work):
    with claim_directory(directory, resumed=False, resume_command="sft --ckpt.resume-step -1"):
        (directory / "configs").mkdir(exist_ok=True)
        (directory / "configs" / "sft.json").write_text("{}")
        work()


def test_start_archives_earlier_start_without_finished_step(tmp_path):
    def fail():
        raise UsageError("chats.jsonl: no such file")

    for _ in range(2):
        with pytest.raises(UsageError, match=r"chats\.jsonl"):
            _start(tmp_path, fail)
    _start(tmp_path, lambda: _record(tmp_path, "sft"))
    assert json.loads((tmp_path / "run.json").read_text())["attempt"] == 1
    assert len(list((tmp_path / "earlier_starts").glob("*/configs/sft.json"))) == 2
    with pytest.raises(UsageError) as refused:
        _start(tmp_path, lambda: None)
    assert refused.value.code == "BK-FILE-EXISTS"
    assert "--clean" not in str(refused.value)  # only rl has this flag
    assert "sft --ckpt.resume-step -1" in str(refused.value)


def _record(directory, process):
    line = {"time": 1.0, "attempt": 1, "process": process, "step": 0}
    (directory / "metrics.jsonl").write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize(
    "left",
    [
        lambda out: (out / "checkpoints" / "step_1").mkdir(parents=True),
        lambda out: (out / "weights" / "step_1").mkdir(parents=True),
        lambda out: _record(out, "trainer"),
        lambda out: (out / "remote.json").write_text("{}"),  # the run may continue on another machine
        lambda out: (out / "status.json").write_text("damaged"),
        lambda out: write_record(out, _record_of_launcher(host="another", state="starting")),
        lambda out: begin_attempt(out, resumed_step=4),
        lambda out: (out / "run.json").unlink(),
        lambda out: (out / "run.json").write_text("damaged"),
    ],
)
def test_start_refuses_directory_with_trained_or_unknown_run(tmp_path, left):
    unstarted(tmp_path)
    left(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(UsageError) as refused:
        check_unused(tmp_path, resume_command="")
    assert refused.value.code == "BK-FILE-EXISTS"
    assert (move_unstarted_run(tmp_path), tree(tmp_path)) == (None, before)


def _record_of_launcher(**values):
    return RunRecord(
        run_id="one",
        attempt=1,
        launcher=None,
        arguments=(),
        working_directory="/",
        max_steps=1,
        max_async_level=1,
        start_step=0,
        stop_seconds=1.0,
        started=1.0,
        **values,
    )


def unstarted(directory):
    """Write the files of a start that fails before its first step."""
    for name in ("configs/rl.json", "logs/attempt_1/trainer.stdout", "weights/step_0/model.safetensors"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    for name in ("evals/step_0/letters.jsonl", "evals/mine/letters.jsonl", "events.jsonl", "notes.txt"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    _record(directory, "orchestrator")
    (directory / "logs" / "trainer.stdout").symlink_to("attempt_1/trainer.stdout")
    begin_attempt(directory, resumed_step=None)


def tree(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("killed_at", range(8))
def test_archiving_an_unstarted_run_can_be_repeated_after_a_kill(tmp_path, monkeypatch, killed_at):
    unstarted(tmp_path)
    before = tree(tmp_path)
    moves, rename = iter(range(99)), Path.rename

    def dying(path, target):
        if next(moves) == killed_at:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "rename", dying)
        move_unstarted_run(tmp_path)
    check_unused(tmp_path, resume_command="")
    move_unstarted_run(tmp_path)
    found = sorted(path.partition("earlier_starts/")[2].partition("/")[2] or path for path in tree(tmp_path))
    assert [name for name in before if not name.startswith("weights")] == found
    assert files_of_a_run(tmp_path) == []
    assert {name for name in tree(tmp_path) if not name.startswith("earlier_starts")} == {
        "evals/mine/letters.jsonl",
        "notes.txt",
    }


@pytest.mark.parametrize("name", ["configs", "logs", "metrics.jsonl"])
def test_start_does_not_take_files_of_a_project_for_a_run(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError) as refused:
        check_unused(tmp_path, resume_command="rl --resume")
    assert refused.value.code == "BK-FILE-EXISTS"
    assert "--resume" not in str(refused.value)


def test_owner_of_a_directory_is_the_run_that_started_there(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    run_id = begin_attempt(run, resumed_step=None).run_id
    begin_attempt(run, resumed_step=3)
    check_owner(run, run_id)
    (run / "run.json").write_text("damaged")
    check_owner(run, run_id)
    (run / "run.json").write_text('{"run_id": "of another run"}')
    for lost in (run, tmp_path / "moved"):
        with pytest.raises(DirectoryLostError):
            check_owner(lost, run_id)


def test_directory_of_a_run_may_be_away_for_a_moment(tmp_path):
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    supervisor = object.__new__(Supervisor)
    supervisor._launch = SimpleNamespace(
        config=SimpleNamespace(output_dir=run), first_attempt=begin_attempt(run, resumed_step=None)
    )
    supervisor._check_directory(10.0)
    run.rename(away)
    supervisor._check_directory(15.0)
    away.rename(run)
    supervisor._check_directory(17.0)
    run.rename(away)
    supervisor._check_directory(22.0)
    with pytest.raises(DirectoryLostError):
        supervisor._check_directory(23.0)
    run.mkdir()
    begin_attempt(run, resumed_step=None)
    supervisor._owned = 23.0
    with pytest.raises(DirectoryLostError):  # another run: at once
        supervisor._check_directory(23.0)


def test_archive_keeps_third_party_files_in_weights(tmp_path):
    unstarted(tmp_path)
    (tmp_path / "weights" / "mine.txt").write_text("mine")
    aside = move_unstarted_run(tmp_path)
    assert [path.name for path in (aside / "weights").iterdir()] == ["mine.txt"]


def test_archiving_refuses_files_that_the_start_needs(tmp_path, refusal):
    unstarted(tmp_path)
    before = tree(tmp_path)
    with refusal(UsageError):
        move_unstarted_run(tmp_path, needed=[tmp_path / "weights" / "step_0"])
    assert tree(tmp_path) == before


def test_clean_deletes_only_files_of_the_run(tmp_path):
    begin_attempt(tmp_path, resumed_step=None)
    ours = ("exports/step_4/README.md", "skipped/step_2/b", "weights/step_1/m", "evals/step_5/x")
    for name in (*ours, "evals/mine.jsonl", "notes.txt", "mine/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    clean(tmp_path)
    assert tree(tmp_path) == ["evals/mine.jsonl", "mine/x", "notes.txt"]


def test_clean_can_be_repeated_after_a_kill(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("there", [[], ["run.toml"]])
def test_refused_start_removes_lock_and_created_folders(tmp_path, there):
    output = tmp_path / "outputs" / "run"
    for name in there:
        output.mkdir(parents=True)
        (output / name).touch()
    with pytest.raises(UsageError, match="no such model"), lock_directory(output):
        raise UsageError("no such model")
    assert sorted(path.name for path in tmp_path.rglob("*")) == (["outputs", "run", *there] if there else [])


def test_lock_file_stays_after_a_start(tmp_path):
    with lock_directory(tmp_path / "run"):
        (tmp_path / "run" / "run.json").touch()
    with lock_directory(tmp_path / "run"):
        pass
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".lock", "run", "run.json"]


@pytest.fixture
def before(monkeypatch):
    """Function that makes the next call of a function of Python run another function first."""

    def patch(name, first):
        module, _, member = name.partition(".")
        function = getattr(sys.modules[module], member)

        def called(*args):
            monkeypatch.setattr(name, function)
            first()
            return function(*args)

        monkeypatch.setattr(name, called)

    return patch


def test_refused_start_keeps_the_lock_of_a_concurrent_start(tmp_path, before):
    run = tmp_path / "run"
    with ExitStack() as other:
        before("os.open", lambda: other.enter_context(lock_directory(run)))
        with pytest.raises(UsageError) as refused, lock_directory(run):
            pass
        assert refused.value.code == "BK-RUN-ACTIVE"
        assert is_in_use(run)


def test_start_after_a_concurrent_refused_start_has_the_lock(tmp_path, before):
    run = tmp_path / "run"
    with ExitStack() as other:
        other.enter_context(lock_directory(run))
        before("fcntl.flock", other.close)
        with lock_directory(run):
            assert is_in_use(run)


def test_lock_on_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog, wording):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    monkeypatch.setattr(logging.getLogger("buckeye"), "propagate", True)
    with lock_directory(tmp_path):
        assert caplog.messages == wording
