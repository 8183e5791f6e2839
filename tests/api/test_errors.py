"""Errors of the Python interface."""

import json
import os
import traceback
from pathlib import Path

import pytest

import buckeye
from buckeye.api.errors import with_python_errors
from buckeye.api.process import RunProcess
from buckeye.envs.registry import CALLER_FILE
from buckeye.errors import UsageError


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("--model ./x: not a folder", "model=./x: not a folder"),
        ("--max-steps: no number", "max_steps: no number"),
        ("lower --seq-len, or --trainer.seq-len", "lower seq_len=, or trainer.seq_len="),
        ("add `--seq-len 2048`", "add `seq_len=2048`"),
        ("a -- b, x--y", "a -- b, x--y"),
        ("run `buckeye eval --model m`\n  buckeye rl @ a --resume", None),
        ("buckeye rl resume out --max-steps N", "buckeye.open_run('out').resume(max_steps=N)"),
        ("resume it\n  buckeye rl resume 'my run'", "resume it\n  buckeye.open_run('my run').resume()"),
    ],
)
def test_errors_name_keywords_in_place_of_flags(message, expected):
    @with_python_errors
    def fail():
        raise UsageError("it failed", code="BK-CLI-ARGUMENT", hint=message)

    with pytest.raises(UsageError) as refused:
        fail()
    assert (refused.value.code, refused.value.hint) == ("BK-CLI-ARGUMENT", expected or message)


@pytest.mark.parametrize(("dataset", "missing"), [([{"prompt": "a"}], "reward"), (None, "env")])
def test_resume_names_the_objects_that_it_needs(tmp_path, dataset, missing):
    (tmp_path / CALLER_FILE).write_text(json.dumps({"dataset": dataset}))

    @with_python_errors
    def fail():
        hint = f"resume it: buckeye rl resume {tmp_path} --max-steps N"
        raise UsageError("it failed", code="BK-CLI-ARGUMENT", hint=hint)

    with pytest.raises(UsageError) as refused:
        fail()
    assert refused.value.hint.endswith(f".resume({missing}=..., max_steps=N)")


def test_traceback_has_no_internal_frames(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        buckeye.evaluate("./missing", dataset=[{"prompt": "a"}], reward=lambda completion: 1.0)
    assert str(refused.value).startswith("model: ")
    frames = traceback.extract_tb(refused.value.__traceback__)
    assert [Path(frame.filename).name for frame in frames] == ["test_errors.py", "errors.py"]
    assert "Traceback" not in "".join(traceback.format_exception(refused.value)).partition("\n")[2]


def test_error_of_a_process_is_raised_and_not_printed(tmp_path, capfd):
    process = RunProcess(["no-such-command"], folder=tmp_path, variables=os.environ)
    with pytest.raises(UsageError) as refused:
        process.wait()
    assert refused.value.code == "BK-CLI-UNKNOWN"
    assert str(refused.value).startswith("no such command: no-such-command")
    assert capfd.readouterr() == ("", "")
