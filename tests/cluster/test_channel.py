"""The connection of two nodes: only who has the key is heard."""

import os
import socket
import threading
import time

import msgspec
import pytest

from buckeye.cluster import messages as say
from buckeye.cluster.channel import LostNodeError, greet, welcome
from buckeye.cluster.key import KEY_VARIABLE, key_for_run, read_key
from buckeye.cluster.remote import RemoteProcess, here
from buckeye.errors import UsageError


def connect(head_key="k" * 32, node_key="k" * 32):
    """Head and node of a connection, and the sockets below."""
    one, other = _pair()
    found = {}

    def head():
        try:
            found["head"] = welcome(one, head_key, timeout=5)
        except LostNodeError as error:
            found["head"] = error
            one.close()

    thread = threading.Thread(target=head)
    thread.start()
    try:
        node = greet(other, node_key, timeout=5)
    except LostNodeError as error:
        node = error
    thread.join(10)
    return found["head"], node, one, other


def _pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        one, _ = listener.accept()
        return one, other


def test_messages_arrive_whole_and_in_order():
    head, node, *_ = connect()
    sent = [say.Alive(), say.Printed(id=3, data=b"x" * 300_000), say.Ended(id=3, code=-9)]
    sender = threading.Thread(target=lambda: [node.send(say.packed(message)) for message in sent])
    sender.start()
    got = []
    while len(got) < len(sent):
        got += [say.of_node(data) for data in head.receive()]
    sender.join(10)
    assert got == sent


def test_another_key_is_refused_on_both_sides():
    head, node, *_ = connect("a" * 32, "b" * 32)
    assert isinstance(head, LostNodeError)
    assert str(head) == "it has another key"
    assert isinstance(node, LostNodeError)


def test_a_head_without_the_key_is_not_believed():
    one, other = _pair()

    def pretend():
        one.sendall(b"buckeye-node-1\n" + bytes(32))
        one.recv(64)
        one.sendall(bytes(32))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(LostNodeError, match="another key"):
        greet(other, "k" * 32, timeout=5)
    thread.join(10)


@pytest.mark.parametrize("place", [2, 10, 40])
def test_what_was_changed_on_the_way_is_noticed(place):
    head, node, _, other = connect()
    written = []
    node._socket = type("Tap", (), {"sendall": lambda self, data: written.append(bytearray(data))})()
    node.send(say.packed(say.Ended(id=1, code=0)))
    written[0][place] ^= 1
    other.sendall(written[0])
    other.shutdown(socket.SHUT_WR)
    heard = []
    with pytest.raises(LostNodeError):
        heard += [head.receive() for _ in range(3)]
    assert not any(heard)


def test_what_was_said_before_is_not_heard_again():
    head, node, _, other = connect()
    written = []
    node._socket = type("Tap", (), {"sendall": lambda self, data: written.append(data)})()
    node.send(say.packed(say.Alive()))
    other.sendall(written[0])
    assert head.receive()
    other.sendall(written[0])
    with pytest.raises(LostNodeError, match="not of its key"):
        head.receive()


def test_an_end_is_told():
    head, node, *_ = connect()
    node.close()
    with pytest.raises(LostNodeError, match="closed"):
        head.receive()


def test_messages_are_read_as_nothing_else():
    with pytest.raises(msgspec.MsgspecError):
        say.of_node(say.packed(say.Start(id=1, title="t", words=(), env={}, cwd="/")))
    with pytest.raises(msgspec.MsgspecError):
        say.of_head(b"\x93abc")


def test_beats_of_a_host_that_has_been_up_for_longer_are_on_this_clock():
    ahead = time.monotonic() + 86_400.0
    line = b'{"pid": 1, "progress": 2, "doing": "x", "on": null, "since": %f, "pulse": %f, "ready": true}\n'
    beats = here(say.Beaten(id=1, lines=line % (ahead - 10, ahead - 1) + b"{torn", now=ahead))
    [beat] = [msgspec.json.decode(line) for line in beats.splitlines()]
    assert beat["since"] == pytest.approx(time.monotonic() - 10, abs=2)
    assert beat["pulse"] == pytest.approx(time.monotonic() - 1, abs=2)
    assert (beat["progress"], beat["ready"], beat["on"]) == (2, True, None)


def test_a_process_is_dead_when_its_node_is_lost(tmp_path):
    told = []
    process = RemoteProcess(7, tmp_path / "out", told.append)
    process.heard(say.Started(id=7, pid=4242))
    process.heard(say.Printed(id=7, data=b"hello\n"))
    process.signal_session(15)
    assert told == [say.Signal(id=7, number=15, session=True)]
    process.lose("lost its node b")
    assert (process.returncode, process.lost, process.pid) == (-9, "lost its node b", 4242)
    process.heard(say.Ended(id=7, code=0))
    process.send_signal(9)
    assert (process.returncode, len(told)) == (-9, 1)
    assert (tmp_path / "out").read_text() == "hello\n"
    os.close(process.beats)


def test_the_key_is_made_once_and_only_its_user_reads_it(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    path = tmp_path / "run" / "cluster.key"
    key = key_for_run(path)
    assert len(key) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert key_for_run(path) == key == read_key(path)
    path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_key(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(UsageError, match="holds no key"):
        read_key(path)
    monkeypatch.setenv(KEY_VARIABLE, "e" * 40)
    assert key_for_run(path) == "e" * 40
    assert KEY_VARIABLE not in os.environ
