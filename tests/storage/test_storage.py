"""Files are complete or absent, at whichever instruction the writer is killed."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from pathlib import Path

import pytest

from buckeye.base import storage
from buckeye.base.foreign_files import NotRegularFileError, read_regular


def _run_writer(final: Path, die_at: int, kind: str) -> tuple[int, int]:
    """Replace version 1 by version 2 in a process that is killed at one line of the writer.

    Return its exit code and the number of executed lines.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            if frame.f_code.co_filename != storage.__file__:
                return None
            if event == "line":
                count += 1
                if count == die_at:
                    os._exit(9)
            return trace

        try:
            sys.settrace(trace)
            if kind == "file":
                storage.write_file(final, "2")
            else:
                storage.write_directory(final, _put("2"), replace=True)
            sys.settrace(None)
            os.write(write, str(count).encode())
            os._exit(0)
        finally:
            os._exit(7)
    os.close(write)
    with os.fdopen(read) as printed:
        lines = int(printed.read() or 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lines


def _put(version: str):
    def fill(directory: Path) -> None:
        (directory / "a").write_text(version)
        (directory / "sub").mkdir()
        (directory / "sub" / "b").write_text(version)

    return fill


@pytest.mark.parametrize(
    ("kind", "existed"),
    [
        ("file", True),
        ("directory", True),
        pytest.param("file", False, marks=pytest.mark.slow),
        pytest.param("directory", False, marks=pytest.mark.slow),
    ],
)
def test_killed_writer_leaves_the_old_or_the_new_state(tmp_path, kind, existed):
    def state(final: Path) -> str:
        if kind == "file":
            return final.read_text() if final.exists() else "none"
        if not final.exists():
            return "none"
        versions = {(final / "a").read_text(), (final / "sub" / "b").read_text()}
        assert len(versions) == 1
        return versions.pop()

    def prepare(folder: Path) -> Path:
        folder.mkdir()
        if existed and kind == "file":
            storage.write_file(folder / "x", "1")
        elif existed:
            storage.write_directory(folder / "x", _put("1"))
        return folder / "x"

    code, lines = _run_writer(prepare(tmp_path / "whole"), 10**9, kind)
    assert code == 0
    seen = set()
    for die_at in {1, 2, 3, *range(4, lines, max(1, lines // 8)), *range(lines - 6, lines + 1)}:
        final = prepare(tmp_path / f"die_{die_at}")
        assert _run_writer(final, die_at, kind)[0] == 9
        seen.add(state(final))
        storage.write_file(final.parent / "next", "x")  # the next writer cleans up
        assert {p.name for p in final.parent.iterdir()} <= {"x", "next"}
    assert seen == ({"1", "2"} if existed else {"none", "2"})


def test_write_directory_replaces_only_with_replace(tmp_path):
    storage.write_directory(tmp_path / "x", _put("1"))
    with pytest.raises(FileExistsError):
        storage.write_directory(tmp_path / "x", _put("2"))
    assert (tmp_path / "x" / "a").read_text() == "1"
    storage.write_directory(tmp_path / "x", _put("2"), replace=True)
    assert (tmp_path / "x" / "a").read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_files_have_the_permissions_of_the_umask(tmp_path):
    """Files that a library made private, as safetensors does, get the same modes."""

    def fill(directory: Path) -> None:
        for name, mode in {"private": 0o600, "program": 0o700, "sub/deep": 0o600}.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
            path.chmod(mode)
        (directory / "link").symlink_to(shared)
        os.link(shared, directory / "shared")

    shared = tmp_path / "of another user"
    shared.touch(0o600)
    before = os.umask(0o027)
    try:
        storage.write_directory(tmp_path / "x", fill)
    finally:
        os.umask(before)
    modes = {
        p.name: oct(p.lstat().st_mode & 0o777)
        for p in (tmp_path / "x").rglob("*")
        if p.is_file() and not p.is_symlink()
    }
    assert modes == {"private": "0o640", "program": "0o740", "deep": "0o640", "shared": "0o600"}


def test_a_failing_fill_leaves_nothing(tmp_path):
    def fill(directory: Path) -> None:
        (directory / "a").write_text("1")
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError):
        storage.write_directory(tmp_path / "a" / "b" / "x", fill)
    assert list(tmp_path.iterdir()) == []


def test_replace_works_without_atomic_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_exchange", lambda one, other: False)
    storage.write_directory(tmp_path / "x", _put("1"))
    storage.write_directory(tmp_path / "x", _put("2"), replace=True)
    assert (tmp_path / "x" / "sub" / "b").read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_leftovers_of_running_processes_are_kept(tmp_path):
    mine = tmp_path / f".other.tmp-{os.getpid()}"
    mine.mkdir()
    storage.write_file(tmp_path / "x", b"1")
    assert mine.exists()


def test_step_directories_are_ordered_by_number(tmp_path):
    for name in ("step_10", "step_9", "step_0", "step_01", "step_x", ".step_3.tmp-1"):
        (tmp_path / name).mkdir()
    assert list(storage.step_directories(tmp_path)) == [0, 9, 10]
    assert storage.step_directories(tmp_path / "none") == {}
    assert storage.step_directory(tmp_path, 9) == storage.step_directories(tmp_path)[9]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("an \u00e4 \U0001f600", "an \u00e4 \U0001f600"),
        ("a\ud800b", "a\ufffdb"),
        ("\ud83d\ude00", "\U0001f600"),
    ],
    ids=["characters", "half a pair", "both halves"],
)
def test_any_text_can_be_written(tmp_path, text, written):
    storage.write_file(tmp_path / "file", text)
    assert (tmp_path / "file").read_text(encoding="utf-8") == written
    assert storage.well_formed({text: [text, 1, None]}) == {written: [written, 1, None]}


def test_folder_in_place_of_a_file_is_refused_and_closed(tmp_path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(NotRegularFileError):
        read_regular(tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_pipe_or_device_is_written_and_not_replaced(tmp_path):
    """A root user may write to `/dev/null`, the device of the machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    storage.write_file(pipe, "text")
    assert pipe.is_fifo()
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    with pytest.raises(OSError):  # noqa: PT011  and no wait for a reader
        storage.write_file(pipe, "text")


def test_link_to_an_open_file_is_written_and_not_replaced(tmp_path, monkeypatch):
    """`/dev/stdout` is such a link."""
    monkeypatch.setattr(storage, "_DEVICE_FOLDERS", (tmp_path / "dev",))
    (tmp_path / "dev").mkdir()
    (tmp_path / "output").write_text("printed\n")
    (tmp_path / "dev" / "stdout").symlink_to(tmp_path / "output")
    storage.write_file(tmp_path / "dev" / "stdout", "written\n")
    assert (tmp_path / "dev" / "stdout").is_symlink()
    assert (tmp_path / "output").read_text() == "printed\nwritten\n"


def test_a_check_of_a_lock_does_not_prevent_it(tmp_path):
    """A status that checks the lock of a run must not look like the run to one that starts."""
    path = tmp_path / "lock"
    check = os.open(path, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(check, fcntl.LOCK_SH)
    threading.Timer(0.05, os.close, [check]).start()
    held = storage.try_lock(path)
    assert held is not None
    assert storage.is_locked(path)
    assert storage.try_lock(path) is None
    os.close(held)
    assert not storage.is_locked(path)
