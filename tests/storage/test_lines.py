"""Lines are written completely or not at all: by several writers, after a kill, on a full disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from buckeye.base.json_lines import LineFile, LineStream, read_json_lines
from buckeye.run_files.events import read_events, write_event
from tests.small_disk import fill


def test_append_without_room_leaves_the_file_unchanged(disk, refusal):
    file = LineFile(disk / "x")
    file.append(b"one\n")
    ballast = fill(disk)
    with refusal(OSError):
        file.append(b"y" * 8000 + b"\n")
    assert (disk / "x").read_bytes() == b"one\n"
    ballast.unlink()
    file.append(b"two\n")
    file.close()
    assert (disk / "x").read_bytes() == b"one\ntwo\n"


def test_append_terminates_a_partial_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st')
    file = LineFile(path)
    file.append(b'{"step": 2}\n')
    file.close()
    assert list(read_json_lines(path)) == [{"step": 1}, {"step": 2}]


_WRITER = """
import sys
from pathlib import Path
from buckeye.base.json_lines import LineFile
file = LineFile(Path(sys.argv[1]))
for number in range(400):
    try:
        file.append((f"{sys.argv[2]} {number} " + "x" * 500 + "\\n").encode())
    except OSError:
        print(number)
"""


def test_concurrent_writers_on_a_full_disk_mix_no_lines(disk):
    fill(disk, leave=200_000)
    path = disk / "shared"
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, path, name], stdout=subprocess.PIPE, text=True)
        for name in "abc"
    ]
    refused = sum(len(writer.communicate()[0].split()) for writer in writers)
    lines = path.read_text().splitlines()
    assert refused > 0
    assert len(lines) + refused == 3 * 400
    assert all(line.endswith("x" * 500) and line.count(" ") == 2 for line in lines)


def test_append_continues_if_a_suspended_writer_has_the_lock(tmp_path):
    path = tmp_path / "x"
    holder = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", holder, path], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        file = LineFile(path)
        file.append(b"one\n")
        file.close()
        process.kill()
    assert path.read_bytes() == b"one\n"


@given(st.lists(st.text(alphabet="ab\nŋ\ud800", max_size=8), max_size=12))
def test_stream_writes_its_input(tmp_path_factory, parts):
    path = tmp_path_factory.mktemp("stream") / "x"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    stream = LineStream(descriptor)
    for part in parts:
        assert stream.write(part) == len(part)
    whole = "".join(parts)
    assert path.read_bytes().decode() == _encodable(whole[: whole.rfind("\n") + 1])
    stream.flush()
    assert path.read_bytes().decode() == _encodable(whole)
    os.close(descriptor)


def _encodable(text: str) -> str:
    return text.replace("\ud800", "\\ud800")


_PRINTER = """
import logging, os, sys
from pathlib import Path
from buckeye.monitor.log import run_log, setup_logging
sys.path.insert(0, sys.argv[2])
from tests.small_disk import fill
disk = Path(sys.argv[1])
setup_logging("info", "trainer", run_log(disk))
log = logging.getLogger("buckeye.test")
log.info("before")
ballast = fill(disk)
for number in range(200):
    log.info("%d %s", number, "x" * 500)
    print("printed", number)
    print("told", number, file=sys.stderr, flush=True)
ballast.unlink()
log.info("after")
"""


def test_stream_on_a_full_disk_reports_lost_lines_later(disk):
    root = Path(__file__).parents[2]
    (disk / "logs").mkdir()
    with (disk / "logs" / "trainer.stdout").open("ab") as stdout:
        command = [sys.executable, "-c", _PRINTER, disk, root]
        result = subprocess.run(command, stdout=stdout, stderr=subprocess.STDOUT, check=False)
    assert result.returncode == 0
    for name in ("trainer.stdout", "run.log"):
        lines = (disk / "logs" / name).read_text().splitlines()
        assert lines[0].endswith("before")
        assert lines[-1].endswith("after")
        notes = [line for line in lines if line.endswith(" lines lost: the disk was full)")]
        lost = sum(int(note[1:].split()[0]) for note in notes)
        assert lost > 0
        between = [line for line in lines[1:-1] if line not in notes]
        assert len(between) + lost == (200 if name == "run.log" else 600)
        assert all(line.endswith("x" * 500) or line.split()[0] in ("printed", "told") for line in between)


def test_events_without_room_are_dropped_and_later_ones_written(disk):
    write_event(disk, "start", attempt=1)
    ballast = fill(disk)
    for step in range(3):
        write_event(disk, "checkpoint", attempt=1, step=step, path="x" * 4096)
    there = (disk / "events.jsonl").read_text()
    assert [json.loads(line)["event"] for line in there.splitlines()] == ["start"]
    ballast.unlink()
    write_event(disk, "finish", attempt=1)
    events = [(e["event"], e.get("step")) for e in read_events(disk)]
    assert events == [("start", None), ("finish", None)]
