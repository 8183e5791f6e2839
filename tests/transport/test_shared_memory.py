"""Memory that the trainer shares with engines on its machine."""

import os
import subprocess
import sys

import pytest
import torch

from buckeye.transport.broadcast_group import allocate_shared, open_shared


@pytest.fixture
def shared():
    buffer, descriptor = allocate_shared(5000)
    yield buffer, f"/proc/{os.getpid()}/fd/{descriptor}"
    os.close(descriptor)


def test_other_process_reads_the_memory_and_cannot_change_it(shared):
    buffer, path = shared
    buffer[:] = 7
    script = (
        "import sys; from buckeye.transport.broadcast_group import open_shared\n"
        "found = open_shared(sys.argv[1], 5000); assert int(found.sum()) == 35000; found[:] = 1"
    )
    subprocess.run([sys.executable, "-c", script, path], check=True, timeout=60)
    assert torch.equal(buffer, torch.full((5000,), 7, dtype=torch.uint8))


def test_only_shared_memory_of_this_size_is_opened(shared, tmp_path):
    _, path = shared
    with open(tmp_path / "file", "wb+") as file:
        file.write(bytes(5000))
        for other in (f"/proc/{os.getpid()}/fd/{file.fileno()}", str(tmp_path / "file"), f"{path}/../0"):
            with pytest.raises((OSError, ValueError)):
                open_shared(other, 5000)
    with pytest.raises(ValueError, match="size"):
        open_shared(path, 5_000_000)


def test_system_without_shared_memory_gets_an_ordinary_buffer(monkeypatch):
    def forbidden(name):
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", forbidden)
    buffer, descriptor = allocate_shared(10)
    assert (buffer.nbytes, descriptor) == (10, None)


def test_full_memory_gives_an_ordinary_buffer_and_leaks_no_descriptor(monkeypatch):
    def full(descriptor, start, size):
        raise OSError

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert allocate_shared(10)[1] is None
    assert len(os.listdir("/proc/self/fd")) == before
