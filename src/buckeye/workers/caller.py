"""Server that gives a run access to an environment object of the process that started the run.

The run connects to this server like to a worker host on another node. The object is not pickled: it stays in
the process that created it.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib
import json
import logging
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from buckeye.envs.base import Environment
from buckeye.envs.registry import CALLER
from buckeye.envs.settings import PLACEMENT_VARIABLE
from buckeye.workers.process_start import LOOPBACK, SHARED_FOLDER, WORKERS_KEY
from buckeye.workers.worker_side import main as worker_main
from buckeye.workers.worker_side.frames import FrameError, decode, receive_body

log = logging.getLogger(__name__)

_MAX_REQUEST_BYTES = 1 << 20
_KEY_SECONDS = 10.0


class EnvironmentServer:
    """Serves an environment object to the runs that have its key, until it is closed.

    All methods of the object run in one event loop, for all processes of a run.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._key = secrets.token_urlsafe(24)
        self._listener = socket.create_server((LOOPBACK, 0))
        worker_main.load_package(str(SHARED_FOLDER))
        self._loop = asyncio.new_event_loop()
        for work in (self._loop.run_forever, self._accept):
            threading.Thread(target=work, name="buckeye-environment", daemon=True).start()

    def variables(self) -> Mapping[str, str]:
        """Return the environment variables that make a run use this server for its environment CALLER."""
        placement = {"address": LOOPBACK, "nodes": [[LOOPBACK, self._listener.getsockname()[1]]]}
        return {WORKERS_KEY: self._key, PLACEMENT_VARIABLE: json.dumps({CALLER: placement})}

    def close(self) -> None:
        """Stop accepting connections. An open connection ends when its run ends."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        serving = []
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                serving.append(
                    threading.Thread(
                        target=self._serve, args=(connection,), name="buckeye-environment", daemon=True
                    )
                )
                serving[-1].start()
        for thread in serving:
            thread.join()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one process of a run, until it ends."""
        connection.settimeout(_KEY_SECONDS)
        with connection, suppress(OSError, FrameError):
            request = decode(receive_body(connection, _MAX_REQUEST_BYTES))
            if not hmac.compare_digest(str(request.get("key")).encode(), self._key.encode()):
                log.warning("Rejected a connection to the environment: the client sent no valid key")
                return
            connection.settimeout(None)
            ended, adapter = threading.Event(), _adapter_of(self._environment)
            side = worker_main.WorkerSide(connection, self._loop, adapter=adapter, on_lost=ended.set)
            self._loop.call_soon_threadsafe(side.start)
            ended.wait()
            self._loop.call_soon_threadsafe(side.stop)


def _adapter_of(environment: Environment) -> Any:
    adapters = importlib.import_module(f"{worker_main.PACKAGE}.adapters.buckeye_environment")
    return adapters.BuckeyeEnvironment(environment)
