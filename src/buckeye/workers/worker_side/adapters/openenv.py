"""Adapter for environments of OpenEnv: servers whose WebSocket sessions are episodes.

The adapter starts the server, or uses the one at the argument `url`. Each rollout has its own session, which
ends with the rollout. A reply is the only text field of an action, or the whole action as JSON. A reply that
the server does not accept as an action is answered with the reason, and has no reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from .base import AdapterError, Json, SeededAdapter, check_arguments, first_messages
from .episodes import Step, run_episode
from .programs import start_process_group

PREFIX = "openenv/"
OWN_ARGUMENTS = ("url", "folder", "reset", "num_tasks", "num_eval", "seed", "max_steps", "system_prompt")
_START_SECONDS = 120.0
_CAPACITY_SECONDS = 60.0
_CAPACITY_HINT = (
    "Raise `max_concurrent_envs` of the server. With max_async_level = 0, all rollouts of a batch need a "
    "session at the same time; else `max_concurrent` of the [[env]] limits them"
)
_CLOSE_SECONDS = 10.0
_END_SECONDS = 5.0


class OpenEnv(SeededAdapter):
    """One server, which gets the seed of a task at the reset."""

    def __init__(self, env_id: str, args: Json) -> None:
        check_arguments(env_id, args, OWN_ARGUMENTS)
        super().__init__(env_id, args)
        self.connect = importlib.import_module("websockets.asyncio.client").connect
        self.max_steps, self.options = int(args.get("max_steps", 100)), dict(args.get("reset", {}))
        self._process: subprocess.Popen[bytes] | None = None
        if not str(args.get("url", "http://")).startswith(("http://", "https://")):
            raise AdapterError(f"{env_id}: `url` must be the address of a server, such as http://host:8000")
        self._url = str(args.get("url") or self._start_server(args.get("folder"))).rstrip("/")
        try:
            self._wait_until_healthy()
            self.action = json.loads(self._get("/schema"))["action"]
        except (AdapterError, OSError, ValueError, KeyError) as error:
            self._end_server()
            if isinstance(error, AdapterError):
                raise
            raise AdapterError(f"{env_id}: {self._url} is not a server of OpenEnv: {error}") from error
        self.field = _text_field(self.action)
        form = "" if self.field else f"Reply with a JSON object of this schema: {json.dumps(self.action)}"
        self._system = "\n\n".join(filter(None, [str(args.get("system_prompt", "")), form]))

    @property
    def socket_url(self) -> str:
        """Address of a new session."""
        return f"ws{self._url.removeprefix('http')}/ws"

    def _start_server(self, folder: str | None) -> str:
        """Start the server of `MODULE:APP` on a free port, and return its URL."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        name = self.name.removeprefix(PREFIX)
        command = [sys.executable, "-m", "uvicorn", name, "--host", "127.0.0.1", "--port", str(port)]
        self._process = subprocess.Popen(  # noqa: S603  the user names the module
            [*command, "--log-level", "warning"],
            cwd=os.path.expanduser(folder) if folder else None,
            stdin=subprocess.DEVNULL,
            preexec_fn=start_process_group,
        )
        return f"http://127.0.0.1:{port}"

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self._get("/health")
                return
            except OSError as error:
                if self._process is None or time.monotonic() > deadline:
                    raise AdapterError(f"{self.name}: no server at {self._url}: {error}") from error
            if self._process.poll() is not None:
                raise AdapterError(f"{self.name}: the server ended with exit code {self._process.returncode}")
            time.sleep(0.1)

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self._url}{path}", timeout=10.0) as response:  # noqa: S310  only http
            return bytes(response.read())

    def _end_server(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 15)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)

    def task_messages(self, seed: int) -> list[Json]:
        return first_messages(self._system, None)

    async def rollout(self, task: Json, endpoint: Json, context: Json) -> Json:
        return await run_episode(OpenEnvEpisode(self, task), endpoint)

    async def close(self) -> None:
        self._end_server()


class SessionError(Exception):
    """Error that the server reports."""


class OpenEnvEpisode:
    """Session of a server."""

    def __init__(self, adapter: OpenEnv, task: Json) -> None:
        self._adapter, self._task = adapter, task
        self._socket: Any = None
        self._turns = self._invalid = 0

    async def start(self) -> list[Json]:
        """Open a session, when the server has room for it, and reset it."""
        deadline = time.monotonic() + _CAPACITY_SECONDS
        options = {"seed": self._task["data"]["seed"], **self._adapter.options}
        while True:
            # without pings of the client: a slow reply must not end the session
            self._socket = await self._adapter.connect(
                self._adapter.socket_url, ping_interval=None, max_size=None, proxy=None
            )
            answer = await self._ask("reset", options)
            if answer["type"] != "error":
                break
            await self.close()
            if answer["data"].get("code") != "CAPACITY_REACHED":
                raise SessionError(_error_text(answer))
            if time.monotonic() > deadline:
                raise SessionError(f"{_error_text(answer)}. {_CAPACITY_HINT}")
            await asyncio.sleep(0.2)
        return [*self._task["messages"], _message(answer["data"])]

    async def step(self, reply: str) -> Step:
        self._turns += 1
        stop_reason = "max_steps" if self._turns >= self._adapter.max_steps else ""
        action = {self._adapter.field: reply} if self._adapter.field else _last_object(reply)
        answer: Json = {"type": "error", "data": {}}
        if isinstance(action, dict):
            answer = await self._ask("step", action)
        if answer["type"] == "error":
            if answer["data"].get("code", "VALIDATION_ERROR") != "VALIDATION_ERROR":
                raise SessionError(_error_text(answer))
            self._invalid += 1
            content = f"Not an action: {_error_text(answer)}"
            return Step(reward=None, messages=[{"role": "user", "content": content}], stop_reason=stop_reason)
        data = answer["data"]
        stop_reason = "done" if data.get("done") else stop_reason
        return Step(reward=data.get("reward"), messages=[_message(data)], stop_reason=stop_reason)

    async def _ask(self, kind: str, data: Json) -> Json:
        """Send a request. If the server refused the session, the answer is its error."""
        with contextlib.suppress(importlib.import_module("websockets.exceptions").ConnectionClosed):
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        return json.loads(await self._socket.recv())  # type: ignore[no-any-return]

    def components(self) -> Mapping[str, float]:
        return {"invalid_actions": self._invalid}

    async def close(self) -> None:
        """End the session, so that the server has room for another one."""
        connection, self._socket = self._socket, None
        if connection is not None:
            await asyncio.wait_for(connection.close(), _CLOSE_SECONDS)


def _text_field(schema: Json) -> str | None:
    """Return the field of an action that a reply fills: its only required field, if this is a text."""
    required = schema.get("required") or []
    fields = schema.get("properties", {})
    return required[0] if len(required) == 1 and fields[required[0]].get("type") == "string" else None


def _message(data: Json) -> Json:
    """Return an observation as a message: its only text, or else its fields as JSON."""
    fields = {name: value for name, value in data["observation"].items() if name != "metadata"}
    texts = [value for value in fields.values() if isinstance(value, str)]
    content = texts[0] if len(texts) == len(fields) == 1 else json.dumps(fields, ensure_ascii=False)
    return {"role": "user", "content": content}


def _last_object(text: str) -> Any:
    """Return the last JSON object in a text, or None. Braces of other text may be around it."""
    found, at = None, text.find("{")
    while at >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)
    return found


def _error_text(answer: Json) -> str:
    data = answer["data"]
    details = "; ".join(
        f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in data.get("errors", ())
    )
    return ": ".join(filter(None, [data.get("message", "not a JSON object"), details]))
