"""Choice of the checkpoint that a run resumes."""

import json

import pytest

from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import CheckpointError
from buckeye.launch.resume import find_run_origin
from buckeye.run_files.directory import begin_attempt
from buckeye.runs.status import newest_step
from buckeye.transport.checkpoint import list_checkpoints

from .made_runs import made_run


def resumed_at(run, *words):
    flags = ["--trainer", "--orchestrator", "--output-dir", str(run), *words]
    step = find_run_origin(load_config(RLConfig, flags)).step
    if words == ("--resume",):
        assert step == newest_step(run)  # the step that `rl status` reports
    return step


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return made_run(tmp_path / "run", checkpoints=(4, 6, 8))


def test_resume_repeats_earlier_step_until_a_commit(run):
    assert resumed_at(run, "--resume") == 8
    begin_attempt(run, resumed_step=4)
    assert resumed_at(run, "--resume") == 4
    assert resumed_at(run, "--ckpt.resume-step", "6") == 6
    begin_attempt(run, resumed_step=5)  # no checkpoint of this attempt is left
    assert resumed_at(run, "--resume") == 8


def test_resume_uses_commit_of_newest_attempt(run):
    begin_attempt(run, resumed_step=4)
    committed = run / "checkpoints" / "step_6" / "COMMITTED"
    committed.write_text(json.dumps({**json.loads(committed.read_text()), "attempt": 2}))
    assert resumed_at(run, "--resume") == 6


def test_resume_skips_damaged_checkpoint(run):
    begin_attempt(run, resumed_step=4)
    (path,) = (info.path for info in list_checkpoints(run / "checkpoints") if info.step == 4)
    (path / "trainer" / "model.safetensors").write_bytes(b"x")
    words = ["--trainer", "--orchestrator", "--output-dir", str(run), "--resume"]
    assert find_run_origin(load_config(RLConfig, words)).step == 8
    with pytest.raises(CheckpointError):
        resumed_at(run, "--ckpt.resume-step", "4")
