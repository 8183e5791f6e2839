"""A write waits for free space for a limited time, and removes its partial file if it fails."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading

import pytest

from buckeye.base import disk as disk_room
from buckeye.base import storage
from buckeye.base.disk import (
    free_space_text,
    is_disk_full,
    size_of,
    write_when_room,
    write_when_room_async,
)
from buckeye.errors import DiskFullError
from tests.small_disk import fill, small_disk
from tests.waiting import HANG


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(disk_room, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(disk_room, "reserve_bytes", lambda path: 100_000)


def _write(path, size):
    return write_when_room(path, lambda: storage.write_file(path, b"x" * size), what="the thing", needed=size)


def _free_when_told(caplog, ballast):
    """Free the disk as soon as the wait is logged; return the thread."""

    def free():
        for _ in range(1000):
            if any("for space" in message for message in caplog.messages):
                break
            threading.Event().wait(0.01)
        ballast.unlink()

    thread = threading.Thread(target=free)
    thread.start()
    return thread


def test_a_write_waits_for_its_bytes_and_the_reserve(disk, caplog, wording):
    (disk / "run.json").write_text("{}")
    (disk / "rollouts").mkdir()
    (disk / "rollouts" / "step_0.jsonl").write_bytes(b"y" * 20_000)
    ballast = fill(disk, leave=150_000)
    _write(disk / "batches" / "small", 40_000)  # 140 000 of 150 000
    (disk / "batches" / "small").unlink()
    caplog.set_level(logging.INFO, logger="buckeye")
    thread = _free_when_told(caplog, ballast)
    _write(disk / "batches" / "large", 60_000)
    thread.join()
    assert (disk / "batches" / "large").stat().st_size == 60_000
    (told,) = caplog.messages
    assert told == wording


def test_write_is_retried_if_the_disk_becomes_full(disk, caplog):
    ballast = fill(disk, leave=50_000)
    tries = []

    def write():
        tries.append(1)
        storage.write_directory(disk / "x", lambda folder: (folder / "f").write_bytes(b"x" * 90_000))

    thread = _free_when_told(caplog, ballast)
    write_when_room(disk / "x", write, what="the thing", needed=0)
    thread.join()
    assert len(tries) >= 2
    assert [path.name for path in disk.iterdir()] == ["x"]


def test_small_write_may_use_the_reserve(disk):
    fill(disk, leave=50_000)
    write_when_room(disk / "x", lambda: storage.write_file(disk / "x", "1"), what="it", needed=0)
    assert (disk / "x").read_text() == "1"


def test_needed_space_is_the_size_of_the_newest_step(disk, caplog, wording):
    for step, size in ((1, 10), (2, 300_000), (10, 200_000)):
        storage.write_directory(
            disk / "weights" / f"step_{step}", lambda d, size=size: (d / "f").write_bytes(b"x" * size)
        )
    ballast = fill(disk, leave=250_000)
    thread = _free_when_told(caplog, ballast)
    target = disk / "weights" / "step_11"
    write_when_room(target, lambda: storage.write_directory(target, lambda d: None), what="version 11")
    thread.join()
    assert caplog.messages[0] == wording


def test_wait_ends_with_disk_full_error(disk, monkeypatch, refusal):
    monkeypatch.setattr(disk_room, "WAIT_SECONDS", 0.05)
    fill(disk)
    with refusal(DiskFullError):
        _write(disk / "x", 8000)
    assert [path.name for path in disk.iterdir()] == ["ballast"]


def test_other_errors_are_raised_at_once(tmp_path):
    def fails():
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        write_when_room(tmp_path / "x", fails, what="it", needed=0)


def test_other_tasks_run_during_a_wait_and_cancelling_ends_it(disk, caplog):
    fill(disk)

    async def scenario():
        path = disk / "x"
        writing = asyncio.create_task(
            write_when_room_async(path, lambda: storage.write_file(path, b"x" * 8000), what="it", needed=8000)
        )
        while not caplog.messages:
            await asyncio.sleep(0.01)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert not (disk / "x").exists()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_other_tasks_run_during_a_write(tmp_path):
    release = threading.Event()

    async def scenario():
        write = asyncio.create_task(write_when_room_async(tmp_path, release.wait, what="it", needed=0))
        await asyncio.sleep(0.01)
        release.set()
        assert await write

    asyncio.run(asyncio.wait_for(scenario(), 30))


_WAITS = """
import sys
from pathlib import Path
from buckeye.base.process import StopFlag
from buckeye.base.disk import write_when_room
from buckeye.base.storage import write_file
StopFlag().install()
path = Path(sys.argv[1]) / "x"
write_when_room(path, lambda: write_file(path, b"x" * 8000), what="the thing", needed=8000)
"""


def test_a_request_to_stop_ends_the_wait(disk, wording):
    fill(disk)
    process = subprocess.Popen([sys.executable, "-c", _WAITS, disk], stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline() == wording
    process.terminate()
    _, printed = process.communicate(timeout=HANG)
    assert "DiskFullError" in printed


def test_few_free_files_are_counted(tmp_path, wording):
    with small_disk(tmp_path / "few", size=1_000_000, files=20) as disk:
        assert free_space_text(disk) == wording


def test_size_of_impossible_path_is_zero(tmp_path):
    (tmp_path / "file").write_text("x")
    assert size_of(tmp_path / "file" / "weights") == size_of(tmp_path / "gone") == 0


def test_disk_full_error_of_a_library_is_recognized(disk, refusal):
    import torch
    from safetensors.torch import save_file

    fill(disk, leave=40_000)
    with refusal(Exception) as raised:
        save_file({"x": torch.zeros(100_000)}, disk / "x.safetensors")
    assert is_disk_full(raised.value)
    assert not is_disk_full(ValueError("No space left between the lines"))
