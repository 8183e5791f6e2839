"""What the head says to hosts that want to be nodes, and does when one is lost."""

import socket
import threading

import pytest

from buckeye.cluster import messages as say
from buckeye.cluster.channel import greet
from buckeye.cluster.head import Nodes
from buckeye.config.rl import ClusterConfig
from buckeye.errors import RunError, UsageError
from tests.cluster.hosts import wait_until
from tests.ports import free_port

KEY = "k" * 32


class Node:
    """A host that says what a test wants it to."""

    def __init__(self, port, *, name="b", number=None, version="1"):
        connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.channel = greet(connection, KEY, timeout=10)
        hello = say.Hello(
            version=version, name=name, number=number, cores=4, gpus=(), address="127.0.0.2", variables={}
        )
        self.tell(hello)
        self.answer = self.next()

    def tell(self, message):
        self.channel.send(say.packed(message))

    def next(self):
        """The next message that is more than a sign of life."""
        while True:
            for data in self.channel.receive():
                message = say.of_head(data)
                if not isinstance(message, say.Alive):
                    return message


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def nodes(tmp_path, port):
    config = ClusterConfig(nodes=3, address="127.0.0.1", port=port, join_timeout=0.5, lost_timeout=5)
    found = Nodes(config, KEY, tmp_path, version="1")
    yield found
    found.close()


def test_nodes_get_the_number_that_they_want_or_had(nodes, port, tmp_path):
    first, second = Node(port, name="b", number=2), Node(port, name="c")
    assert (first.answer.number, second.answer.number) == (2, 1)
    assert first.answer.output_dir == str(tmp_path)
    full = Node(port, name="d")
    assert isinstance(full.answer, say.Refused)
    assert not full.answer.final
    first.channel.close()
    second.channel.close()
    wait_until(lambda: len(nodes.absent([0, 1, 2])) == 2, 10, "both are missed")
    assert nodes.absent([1, 2]) == ["node 1 (c)", "node 2 (b)"]
    assert Node(port, name="b").answer.number == 2
    assert Node(port, name="e").answer.number == 1


@pytest.mark.parametrize(
    ("given", "said"), [({"version": "2"}, "version 2"), ({"number": 3}, "nodes 1 to 2")]
)
def test_a_node_that_cannot_be_of_the_run_is_told_why(nodes, port, given, said):
    refused = Node(port, **given).answer
    assert isinstance(refused, say.Refused)
    assert refused.final
    assert said in refused.reason


def test_processes_are_started_there_and_die_with_the_node(nodes, port, tmp_path):
    node = Node(port)
    started = []
    words = {
        "title": "trainer 1",
        "words": ("-m", "buckeye"),
        "env": {"RANK": "1"},
        "stdout": tmp_path / "out",
    }
    thread = threading.Thread(target=lambda: started.append(nodes.start(1, **words)))
    thread.start()
    asked = node.next()
    assert (asked.words, asked.env) == (("-m", "buckeye"), {"RANK": "1"})
    node.tell(say.Started(id=asked.id, pid=99))
    thread.join(10)
    [process] = started
    assert (process.pid, process.poll()) == (99, None)
    node.tell(say.Printed(id=asked.id, data=b"a line\n"))
    node.channel.close()
    assert process.wait(10) == -9
    assert "lost its node b" in process.lost
    assert (tmp_path / "out").read_text() == "a line\n"
    late = nodes.start(1, **words)
    assert (late.returncode, late.lost) == (-9, "lost its node: node 1 (b) is not there")


def test_nodes_that_do_not_come_are_named(nodes, port):
    there = Node(port, name="b")
    with pytest.raises(RunError, match=r"^node 2 did not join within 0 s .* type: buckeye node$"):
        nodes.wait("buckeye node")
    there.channel.close()


def test_a_node_without_the_directory_is_named(nodes, port):
    joined = []
    for name, seen in (("b", True), ("c", False)):
        node = Node(port, name=name)
        joined.append(node)  # lest it is lost

        def answer(node=node, seen=seen):
            node.next()
            node.tell(say.Looked(seen=seen))

        threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(UsageError, match=r"^node 2 \(c\) does not see"):
        nodes.wait("buckeye node")


def test_a_node_may_ask_for_the_end(nodes, port):
    node = Node(port)
    node.tell(say.AskedToStop())
    wait_until(lambda: nodes.stop_asked, 10, "it is heard")


def test_an_address_of_another_host_is_refused(tmp_path):
    config = ClusterConfig(nodes=2, address="192.0.2.1", port=29400)
    with pytest.raises(UsageError, match=r"192.0.2.1:29400 .* cluster.address"):
        Nodes(config, KEY, tmp_path, version="1")
