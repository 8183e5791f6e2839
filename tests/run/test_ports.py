"""Ports of several runs on one machine."""

import os
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from buckeye.base.http_server import listen
from buckeye.base.storage import private_folder
from buckeye.errors import PortTakenError, RunError, UsageError
from buckeye.launch.preflight.ports import Ports, is_free


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "buckeye-ports"


def test_reserved_port_is_not_chosen_again(folder):
    with closing(Ports()) as one, closing(Ports()) as other:
        ports = one.choose(20) + other.choose(20) + one.choose(5)
        assert len(set(ports)) == 45
        assert all(map(is_free, ports))
        with pytest.raises(UsageError) as caught:
            other.reserve(ports[:1])
        assert caught.value.code == "BK-PORT-TAKEN"
        assert f"port {ports[0]} " in caught.value.message
    assert list(folder.iterdir()) == []
    with closing(Ports()) as later:
        later.reserve(ports)


def test_second_choice_of_ports_differs(monkeypatch):
    with closing(Ports()) as ports:
        some = ports.choose(3)
        monkeypatch.setattr("buckeye.launch.preflight.ports._PORT_RANGE", range(min(some), min(some) + 40))
        assert not set(some) & set(ports.choose(20))


def test_reserve_refuses_port_in_use():
    ports = Ports()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(UsageError) as caught:
            ports.reserve([port])
        assert caught.value.code == "BK-PORT-TAKEN"
        assert f"port {port} " in caught.value.message
    ports.close()
    with closing(Ports()) as free:
        free.reserve([port])


def test_port_is_free_after_its_holder_is_killed(folder):
    code = (
        "from buckeye.launch.preflight.ports import Ports; print(Ports().choose(1)[0], flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    port = int(holder.stdout.readline())
    with closing(Ports()) as ports:
        with pytest.raises(UsageError):
            ports.reserve([port])
        holder.kill()
        holder.communicate()
        ports.reserve([port])
    assert list(folder.iterdir()) == []


def test_ports_fall_back_if_runtime_directory_is_missing(tmp_path, monkeypatch, refusal):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with closing(Ports()) as ports:
        assert len(ports.choose(2)) == 2
    assert not (tmp_path / "gone").exists()
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with closing(Ports()) as ports, refusal(RunError):
        ports.choose(1)


@pytest.mark.parametrize("what", ["link", "file", "of another user"])
def test_ports_refuse_folder_of_another_user(tmp_path, monkeypatch, what):
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
    with pytest.raises(RunError, match="XDG_RUNTIME_DIR"), closing(Ports()) as ports:
        ports.choose(1)
    assert len(list((theirs / "ports").iterdir())) == 100


def test_private_folder_has_mode_0700(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"buckeye-{os.getuid()}").mkdir(mode=0o777)
    folder = private_folder("ports")
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]


def test_listening_at_a_host_of_another_machine_advises_another_host():
    with pytest.raises(PortTakenError) as caught:
        listen("192.0.2.1", 0, change="Choose a --port.")
    assert "127.0.0.1" in caught.value.hint
    with closing(listen("127.0.0.1", 0, change="")) as taken, pytest.raises(PortTakenError) as caught:
        listen("127.0.0.1", taken.getsockname()[1], change="Choose a --port.")
    assert caught.value.hint == "Choose a --port"
