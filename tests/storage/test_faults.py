"""Effects of fault points, in real processes because most of them end the process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from buckeye.base import faults
from buckeye.base.storage import write_file
from tests.places import ROOT

_PASSES = """
import sys
from buckeye.base.faults import fault_point
for passage in range(1, 4):
    print(passage, flush=True)
    try:
        fault_point("trainer.oom")
    except Exception as error:
        print(type(error).__name__, getattr(error, "errno", ""), flush=True)
"""


def _run(marks: Path, written: str, *, code: str = _PASSES) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "BUCKEYE_FAULTS": written, "BUCKEYE_FAULTS_DONE": str(marks)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("written", "code", "printed"),
    [
        ("trainer.oom=kill@2", -signal.SIGKILL, "1\n2\n"),
        ("trainer.oom=exit", 1, "1\n"),
        ("trainer.oom=nospace@3", 0, "1\n2\n3\nOSError 28\n"),
        ("trainer.oom=error, trainer.step=kill", 0, "1\nRuntimeError \n2\n3\n"),
    ],
)
def test_fault_happens_once_at_its_passage(tmp_path, written, code, printed):
    result = _run(tmp_path, written)
    assert (result.returncode, result.stdout) == (code, printed), result.stderr
    again = _run(tmp_path, written)
    assert (again.returncode, again.stdout) == (0, "1\n2\n3\n"), again.stderr


def test_write_file_leaves_nothing_on_a_full_disk(tmp_path, monkeypatch, refusal):
    monkeypatch.setattr(faults, "_visits", faults.Counter())
    (tmp_path / "marks").mkdir()
    (tmp_path / "files").mkdir()
    monkeypatch.setenv("BUCKEYE_FAULTS", "storage.temporary_written=nospace,storage.before_rename=nospace")
    monkeypatch.setenv("BUCKEYE_FAULTS_DONE", str(tmp_path / "marks"))
    for _ in range(2):
        with refusal(OSError):
            write_file(tmp_path / "files" / "x", "1")
        assert list((tmp_path / "files").iterdir()) == []
    write_file(tmp_path / "files" / "x", "1")
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["x"]


def test_fault_points_of_tests_exist():
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    points = set(re.findall(r'fault_point\("([^"]+)"\)', sources))
    entry = re.compile(rf"([a-z_]+\.[a-z_]+)=(?:{'|'.join(faults._KINDS)})\b")
    files = [ROOT / "CONTRIBUTING.md", *(ROOT / "tests").rglob("*.py")]
    named = {name for file in files for name in entry.findall(file.read_text("utf-8"))}
    assert len(named) > 10
    assert named <= points
