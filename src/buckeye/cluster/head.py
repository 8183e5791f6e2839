"""The head of a run on several hosts: takes the other nodes in, and has them start processes."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from buckeye.base.storage import write_file
from buckeye.cluster import messages as say
from buckeye.cluster.channel import Channel, LostNodeError, derived_key, welcome
from buckeye.cluster.link import Link
from buckeye.cluster.remote import RemoteProcess
from buckeye.config.rl import ClusterConfig
from buckeye.errors import RunError, UsageError

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_TELL_SECONDS = 30.0
_LEAVE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a node has: see `messages.Hello`."""

    name: str
    cores: int
    gpus: tuple[int, ...]
    address: str
    variables: Mapping[str, str]


class Nodes:
    """The other nodes of a run, by their numbers from 1 on. What is lost may come back, or another host in
    its place."""

    def __init__(self, config: ClusterConfig, key: str, output_dir: Path, *, version: str) -> None:
        self._config, self._key, self._version = config, key, version
        self._output_dir = output_dir.absolute()
        self._links: dict[int, Link] = {}
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()
        self._processes = itertools.count(1)
        self._closing = False
        self.stop_asked = False
        """Whether somebody on another node wants the run to end."""
        self._listener = _listener(config)
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    @property
    def inference_key(self) -> str:
        """The key of the inference servers, which every node can compute."""
        return derived_key(self._key, "inference")

    def wait(self, command: str) -> None:
        """Until all nodes are there. Raises RunError after `join_timeout` seconds; `command` is what joins
        one."""
        started = told = time.monotonic()
        log.info(
            "Waiting at most %.0f s for %d more nodes. On each of them type: %s",
            self._config.join_timeout,
            self._config.nodes - 1,
            command,
        )
        while absent := self.absent(range(1, self._config.nodes)):
            now = time.monotonic()
            if now - started > self._config.join_timeout:
                raise RunError(
                    f"{', '.join(absent)} did not join within {self._config.join_timeout:.0f} s "
                    f"(cluster.join_timeout). On each type: {command}"
                )
            if self.stop_asked:
                raise RunError("A node was asked to end before all had joined.")
            if now - told > _TELL_SECONDS:
                log.info("Still waiting for %s, for %.0f s", ", ".join(absent), now - started)
                told = now
            time.sleep(_POLL_SECONDS)
        for number in range(1, self._config.nodes):
            self._check_directory(number)

    def absent(self, numbers: Sequence[int]) -> list[str]:
        """How messages call those of these nodes that are not there."""
        with self._lock:
            return [self._title(number) for number in numbers if number and number not in self._links]

    def facts(self, number: int) -> Facts:
        """What a node has."""
        hello = self._link(number).hello
        return Facts(
            name=hello.name,
            cores=hello.cores,
            gpus=hello.gpus,
            address=hello.address,
            variables=hello.variables,
        )

    def choose_ports(self, number: int, count: int) -> list[int]:
        """Hold `count` free ports of a node for the run."""
        answer = self._link(number).ask(say.ChoosePorts(count=count), self._config.lost_timeout)
        assert isinstance(answer, say.ChosenPorts)
        return answer.ports

    def start(
        self, number: int, *, title: str, words: Sequence[str], env: Mapping[str, str], stdout: Path
    ) -> RemoteProcess:
        """Start a process of Buckeye on a node. If that is lost, so is the process."""
        with self._lock:
            link = self._links.get(number)
        process = RemoteProcess(next(self._processes), stdout, link.tell if link is not None else _unheard)
        if link is None:
            process.lose(f"lost its node: {self._title(number)} is not there")
            return process
        link.watch(process)
        link.tell(
            say.Start(id=process.number, title=title, words=tuple(words), env=dict(env), cwd=os.getcwd())
        )
        if not process.wait_until_started(self._config.lost_timeout):
            process.lose(f"node {number} did not start it")
        return process

    def close(self) -> None:
        """Tell the nodes that the run is over."""
        with self._lock:
            self._closing = True
            links = list(self._links.values())
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # or the thread that accepts would not notice
        self._listener.close()
        for link in links:
            link.leave(_LEAVE_SECONDS)

    # --- joining ---

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="node", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One connection, from the first word to the last."""
        try:
            channel = welcome(connection, self._key, timeout=self._config.lost_timeout)
        except LostNodeError as error:
            log.debug("A connection was refused: %s", error)
            connection.close()
            return
        try:
            link, number = self._take_in(channel)
        except (LostNodeError, msgspec.MsgspecError) as error:
            log.warning("A node was refused: %s", error)
            channel.close()
            return
        try:
            link.listen()
        except (LostNodeError, OSError) as error:
            with self._lock:
                del self._links[number]
            if not self._closing:
                log.warning("Node %d (%s) is lost: %s", number, link.hello.name, error)
            link.lose(f"lost its node {link.hello.name} ({error})")

    def _take_in(self, channel: Channel) -> tuple[Link, int]:
        words: list[bytes] = []
        while not words:
            words = channel.receive()
        hello = say.of_node(words[0])
        if not isinstance(hello, say.Hello):
            raise LostNodeError("it did not say who it is")
        with self._lock:
            refused, number = self._place_of(hello)
            if refused is None:
                link = Link(channel, hello, self._asked_to_stop)
                link.tell(self._welcome(number))  # before anybody else may tell it something
                self._links[number], self._names[number] = link, hello.name
        if refused is not None:
            channel.send(say.packed(refused))
            raise LostNodeError(f"{hello.name}: {refused.reason}")
        log.info("Node %d has joined: %s (%s)", number, hello.name, hello.address)
        return link, number

    def _welcome(self, number: int) -> say.Welcome:
        return say.Welcome(
            number=number, output_dir=str(self._output_dir), lost_timeout=self._config.lost_timeout
        )

    def _place_of(self, hello: say.Hello) -> tuple[say.Refused | None, int]:
        """The number of a node, or why it is refused."""
        if hello.version != self._version:
            reason = f"it has version {hello.version} of Buckeye, and the head {self._version}"
            return say.Refused(reason=f"{reason}: install the same on all nodes", final=True), 0
        if hello.number is not None and not 0 < hello.number < self._config.nodes:
            reason = f"its number is {hello.number}, and the run has nodes 1 to {self._config.nodes - 1}"
            return say.Refused(reason=reason, final=True), 0
        free = [number for number in range(1, self._config.nodes) if number not in self._links]
        if hello.number is not None:
            free = [number for number in free if number == hello.number]
        before = [number for number in free if self._names.get(number) == hello.name]
        fresh = [number for number in free if number not in self._names]
        chosen = next(iter([*before, *fresh, *free]), None)
        if chosen is None or self._closing:
            return say.Refused(reason="all nodes of the run are there", final=False), 0
        return None, chosen

    def _check_directory(self, number: int) -> None:
        """Raise RunError unless a node sees what is written to the output directory."""
        content = secrets.token_hex(16)
        probe = self._output_dir / ".cluster-probe"
        write_file(probe, content)
        try:
            answer = self._link(number).ask(
                say.Look(path=str(probe), content=content), self._config.lost_timeout
            )
        finally:
            probe.unlink(missing_ok=True)
        if not (isinstance(answer, say.Looked) and answer.seen):
            raise UsageError(
                f"{self._title(number)} does not see {self._output_dir} of this host. A run of several nodes "
                "needs an output_dir on a file system that all of them share, under the same path."
            )

    def _asked_to_stop(self) -> None:
        self.stop_asked = True

    def _link(self, number: int) -> Link:
        with self._lock:
            if number not in self._links:
                raise LostNodeError(f"{self._title(number)} is not there")
            return self._links[number]

    def _title(self, number: int) -> str:
        name = self._names.get(number)
        return f"node {number} ({name})" if name is not None else f"node {number}"


def _unheard(message: say.Message) -> None:
    """Nobody is there to be told."""


def _listener(config: ClusterConfig) -> socket.socket:
    assert config.address is not None
    try:
        return socket.create_server((config.address, config.port))
    except OSError as error:
        raise UsageError(
            f"Nodes cannot be awaited at {config.address}:{config.port} ({error.strerror or error}): "
            "cluster.address must be an address of this host, and cluster.port a free port."
        ) from None
