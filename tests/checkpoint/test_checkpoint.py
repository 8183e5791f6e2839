"""A checkpoint exists when its COMMITTED manifest does; one resolver chooses it; damage is detected."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from buckeye.base.faults import FAULTS, FAULTS_DONE
from buckeye.base.process import RunIdentity
from buckeye.errors import CheckpointError
from buckeye.transport.checkpoint import (
    find_usable_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    read_orchestrator_state,
    resolve_checkpoint,
    save_checkpoint,
    trainer_state_directory,
    verify_checkpoint,
)


def _save(root: Path, step: int, attempt: int = 1) -> Path:
    def fill(directory: Path) -> dict[str, str]:
        (directory / "model.safetensors").write_text(f"weights of {step}")
        return {}

    state = {"next": step * 10}
    identity = RunIdentity(run_id="run", attempt=attempt)
    return save_checkpoint(root, step, fill, orchestrator_state=state, identity=identity)


def test_save_and_read(tmp_path):
    _save(tmp_path, 4)
    info = resolve_checkpoint(tmp_path, 4)
    verify_checkpoint(info)
    assert (info.step, info.attempt, info.path) == (4, 1, tmp_path / "step_4")
    assert (trainer_state_directory(info) / "model.safetensors").read_text() == "weights of 4"
    assert read_orchestrator_state(info) == {"next": 40}


def test_newest_is_by_attempt_then_step(tmp_path):
    _save(tmp_path, 2, attempt=1)
    _save(tmp_path, 9, attempt=1)
    _save(tmp_path, 3, attempt=2)
    assert resolve_checkpoint(tmp_path, -1).step == 3
    assert resolve_checkpoint(tmp_path, 9).attempt == 1
    assert [info.step for info in list_checkpoints(tmp_path)] == [2, 3, 9]


def test_resolve_checkpoint_error_lists_the_steps(tmp_path, refusal):
    with refusal(CheckpointError):
        resolve_checkpoint(tmp_path, -1)
    _save(tmp_path, 2)
    _save(tmp_path, 10)
    with refusal(CheckpointError):
        resolve_checkpoint(tmp_path, 5)


def test_uncommitted_directories_are_ignored(tmp_path):
    _save(tmp_path, 1)
    (tmp_path / "step_2" / "trainer").mkdir(parents=True)
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_3" / "COMMITTED").write_text('{"attempt": 1, "fil')
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]


def test_damage_is_noticed(tmp_path, refusal):
    path = _save(tmp_path, 1)
    info = resolve_checkpoint(tmp_path, -1)
    (path / "trainer" / "model.safetensors").write_text("weights of 2")
    with refusal(CheckpointError):
        verify_checkpoint(info)
    (path / "trainer" / "model.safetensors").unlink()
    with refusal(CheckpointError):
        verify_checkpoint(info)
    (path / "orchestrator" / "state.json").write_text("")
    with refusal(CheckpointError):
        read_orchestrator_state(info)


def test_find_usable_checkpoint_skips_damaged_ones(tmp_path, caplog, refusal, wording):
    for step in (1, 2, 3):
        _save(tmp_path, step)
    (tmp_path / "step_4").mkdir()
    (tmp_path / "step_3" / "trainer" / "model.safetensors").write_text("weights of 2")
    assert find_usable_checkpoint(tmp_path, -1, verify_checkpoint).step == 2
    assert caplog.messages == wording
    with pytest.raises(CheckpointError):
        find_usable_checkpoint(tmp_path, 3, verify_checkpoint)
    for step in (1, 2):
        (tmp_path / f"step_{step}" / "trainer" / "model.safetensors").unlink()
    with refusal(CheckpointError):
        find_usable_checkpoint(tmp_path, -1, verify_checkpoint)


def test_several_processes_verify_every_file_together(tmp_path):
    path = _save(tmp_path, 1)
    info = resolve_checkpoint(tmp_path, -1)
    for name in ("trainer/model.safetensors", "orchestrator/state.json"):
        content = (path / name).read_bytes()
        (path / name).write_bytes(b"{}")
        found = 0
        for share in range(3):
            try:
                verify_checkpoint(info, share=share, shares=3)
            except CheckpointError:
                found += 1
        assert found == 1
        (path / name).write_bytes(content)


def test_prune_deletes_the_oldest_and_only_committed_ones(tmp_path):
    for step in (1, 2, 3):
        _save(tmp_path, step)
    _save(tmp_path, 2, attempt=2)
    (tmp_path / "step_0").mkdir()
    assert prune_checkpoints(tmp_path, keep=2) == [1]
    assert prune_checkpoints(tmp_path, keep=5) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_0", "step_2", "step_3"]


_DYING = """
import os, pathlib, sys
from buckeye.transport.checkpoint import save_checkpoint
from buckeye.base.process import RunIdentity
root, when = pathlib.Path(sys.argv[1]), sys.argv[2]
def fill(directory):
    (directory / "model").write_text("new")
    if when == "fill":
        os.kill(os.getpid(), 9)
    return {}
real = pathlib.Path.write_text
def write_text(self, *args, **kwargs):
    if self.name == when:
        os.kill(os.getpid(), 9)
    return real(self, *args, **kwargs)
pathlib.Path.write_text = write_text
save_checkpoint(root, 4, fill, orchestrator_state={}, identity=RunIdentity(run_id="run", attempt=2))
"""


@pytest.mark.parametrize(
    ("when", "attempt"),
    [
        ("fill", 1),
        ("state.json", 1),
        ("COMMITTED", 1),
        ("checkpoint.before_commit", 1),
        ("storage.temporary_written", 1),
        ("storage.before_rename", 1),
        ("storage.after_rename", 2),
        ("checkpoint.committed", 2),
    ],
)
def test_killed_writer_leaves_the_old_or_the_new_and_earlier_checkpoints(tmp_path, when, attempt):
    root, marks = tmp_path / "checkpoints", tmp_path / "marks"
    marks.mkdir()
    _save(root, 2)
    _save(root, 4)
    environment = {**os.environ, FAULTS_DONE: str(marks), FAULTS: f"{when}=kill"}
    command = [sys.executable, "-c", _DYING, str(root), when]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    info = resolve_checkpoint(root, -1)
    verify_checkpoint(info)
    assert (info.step, info.attempt) == (4, attempt)
    assert [one.step for one in list_checkpoints(root)] == [2, 4]
    _save(root, 6)
    assert not list(root.glob(".*"))
