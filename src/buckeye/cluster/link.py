"""The head's connection to one node."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import msgspec

from buckeye.cluster import messages as say
from buckeye.cluster.channel import Channel, LostNodeError
from buckeye.cluster.remote import RemoteProcess

_ALIVE_SECONDS = 1.0

Answer = say.Looked | say.ChosenPorts


class Link:
    """A node that has said `hello`. One thread listens; any may tell."""

    def __init__(self, channel: Channel, hello: say.Hello, asked_to_stop: Callable[[], None]) -> None:
        self.hello = hello
        self._channel = channel
        self._asked_to_stop = asked_to_stop
        self._processes: dict[int, RemoteProcess] = {}
        self._answers: queue.Queue[Answer] = queue.Queue()
        self._asking = threading.Lock()
        self._over = threading.Event()

    def tell(self, message: say.Message) -> None:
        """Send a message; what cannot be sent is lost with the node, which the listener notices."""
        try:
            self._channel.send(say.packed(message))
        except LostNodeError:
            self._channel.close()

    def ask(self, question: say.Message, timeout: float) -> Answer:
        """The answer to a question. Raises LostNodeError if none comes within `timeout` seconds."""
        with self._asking:
            self.tell(question)
            try:
                return self._answers.get(timeout=timeout)
            except queue.Empty:
                raise LostNodeError(f"node {self.hello.name} does not answer") from None

    def watch(self, process: RemoteProcess) -> None:
        """Let a process, which is about to be started, hear what is said of it."""
        self._processes[process.number] = process
        if self._over.is_set():
            process.lose(f"lost its node {self.hello.name}")

    def listen(self) -> None:
        """Until the connection is lost, which raises LostNodeError."""
        threading.Thread(target=self._stay_alive, name=f"alive {self.hello.name}", daemon=True).start()
        try:
            while True:
                for data in self._channel.receive():
                    self._hear(say.of_node(data))
        except msgspec.MsgspecError as error:
            raise LostNodeError(f"it said something that is no message ({error})") from None
        finally:
            self._over.set()
            self._channel.close()

    def lose(self, why: str) -> None:
        """All of its processes are dead."""
        for process in list(self._processes.values()):
            process.lose(why)

    def leave(self, patience: float) -> None:
        """Tell the node that the run is over, and wait at most `patience` seconds for it to hang up."""
        self.tell(say.Leave())
        self._over.wait(patience)
        self._channel.close()

    def _stay_alive(self) -> None:
        while not self._over.wait(_ALIVE_SECONDS):
            self.tell(say.Alive())

    def _hear(self, message: say.FromNode) -> None:
        if isinstance(message, say.Looked | say.ChosenPorts):
            self._answers.put(message)
        elif isinstance(message, say.AskedToStop):
            self._asked_to_stop()
        elif not isinstance(message, say.Hello | say.Alive):
            process = self._processes.get(message.id)
            if process is not None:
                process.heard(message)
            if isinstance(message, say.Ended):
                self._processes.pop(message.id, None)
