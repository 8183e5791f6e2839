"""Ports of several runs on one machine."""

import os
import socket
import subprocess
import sys

import pytest

from buckeye.base.storage import private_folder
from buckeye.errors import RunError, UsageError
from buckeye.launch.preflight.ports import Ports, is_free, reserved_ports


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "buckeye-ports"


def test_no_port_is_given_twice_as_long_as_it_is_held(folder):
    with reserved_ports() as one, reserved_ports() as other:
        ports = one.choose(20) + other.choose(20) + one.choose(5)
        assert len(set(ports)) == 45
        assert all(map(is_free, ports))
        with pytest.raises(UsageError, match=str(ports[0])):
            other.reserve(ports[:1])
    assert list(folder.iterdir()) == []
    with reserved_ports() as later:
        later.reserve(ports)


def test_one_run_asks_for_ports_again_and_gets_others(monkeypatch):
    with reserved_ports() as ports:
        some = ports.choose(3)
        monkeypatch.setattr("buckeye.launch.preflight.ports._CHOICE", range(min(some), min(some) + 40))
        assert not set(some) & set(ports.choose(20))


def test_a_port_that_somebody_listens_on_is_refused():
    ports = Ports()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(UsageError, match=f"Port {port}"):
            ports.reserve([port])
    ports.close()
    with reserved_ports() as free:
        free.reserve([port])


def test_a_port_is_free_again_when_its_holder_is_killed(folder):
    code = (
        "from buckeye.launch.preflight.ports import Ports; print(Ports().choose(1)[0], flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    port = int(holder.stdout.readline())
    with reserved_ports() as ports:
        with pytest.raises(UsageError):
            ports.reserve([port])
        holder.kill()
        holder.communicate()
        ports.reserve([port])
    assert list(folder.iterdir()) == []


def test_a_runtime_directory_that_is_not_there_is_no_obstacle(tmp_path, monkeypatch, refusal):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with reserved_ports() as ports:
        assert len(ports.choose(2)) == 2
    assert not (tmp_path / "gone").exists()
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with reserved_ports() as ports, refusal(RunError):
        ports.choose(1)


@pytest.mark.parametrize("what", ["link", "file", "of another user"])
def test_what_somebody_else_put_in_the_place_of_our_folder_is_not_followed(tmp_path, monkeypatch, what):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    theirs, ours = tmp_path / "theirs", tmp_path / f"buckeye-{os.getuid()}"
    (theirs / "ports").mkdir(parents=True)
    for port in range(20000, 20100):
        (theirs / "ports" / str(port)).write_text("theirs")
    if what == "link":
        ours.symlink_to(theirs)
    elif what == "file":
        ours.write_text("")
    else:
        if os.getuid() != 0:
            pytest.skip("only root can make a folder of another user")
        ours.mkdir()
        os.chown(ours, 65534, 65534)
    with pytest.raises(RunError, match="XDG_RUNTIME_DIR"), reserved_ports() as ports:
        ports.choose(1)
    assert len(list((theirs / "ports").iterdir())) == 100


def test_our_folder_is_for_us_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"buckeye-{os.getuid()}").mkdir(mode=0o777)
    folder = private_folder("ports")
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
