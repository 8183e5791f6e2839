"""Gateway session: pass each message of an environment's process to the HTTP response that needs it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from buckeye.base.process import remove_secrets
from buckeye.mcp.client.errors import McpEnvironmentError
from buckeye.mcp.gateway.channel import Channel
from buckeye.mcp.gateway.json_rpc import (
    SERVER_ERROR,
    JsonRpcMessage,
    RequestId,
    error_response,
    one_line,
    read_line,
)
from buckeye.mcp.gateway.running_environment import RunningEnvironment
from buckeye.mcp.gateway.settings import GatewayError, LaunchRequest

_WRITE_SECONDS = 30.0


class GatewaySession:
    """Open session with one environment. At its end, it calls `on_end` once, with the reason."""

    def __init__(
        self,
        environment: RunningEnvironment,
        launch_request: LaunchRequest,
        on_end: Callable[[GatewaySession, str], None],
    ) -> None:
        self.id = secrets.token_hex(16)
        self.environment, self.launch_request = environment, launch_request
        self.requests = 0
        self.started_at = self.last_used = time.monotonic()
        self.ended: str | None = None
        """Reason why the session ended. None while the session is open."""
        self.disconnected_at: float | None = None
        """Monotonic time when the client closed its stream. None after a later request of the client."""
        self._on_end = on_end
        self._requests: dict[RequestId, Channel] = {}
        self._tokens: dict[RequestId, Channel] = {}
        self._notifications = Channel()
        self._listening = False
        self._reader = asyncio.create_task(self._read())

    @property
    def name(self) -> str:
        """Name for logs and `GET /status`: a prefix of the id, because the full id grants access."""
        return self.id[:8]

    @property
    def in_use(self) -> bool:
        """True if the client waits for a response or reads the session's stream."""
        return bool(self._requests) or self._listening

    @property
    def dropped(self) -> int:
        """Number of messages that the stream dropped, because no client read them."""
        return self._notifications.dropped

    async def forward_request(self, frame: JsonRpcMessage, body: bytes) -> Channel:
        """Forward a request. Return a channel that receives its progress messages and then its response.

        Raises GatewayError 400 if another open request has the same id.
        """
        assert frame.id is not None
        if frame.id in self._requests:
            raise GatewayError(400, "id", f"The request id {frame.id!r} is in use by an open request")
        channel = self._requests[frame.id] = Channel()
        if (token := frame.progress_token()) is not None:
            self._tokens[token] = channel
        self.requests += 1
        await self.forward(body)
        return channel

    async def forward(self, body: bytes) -> None:
        """Write a message of the client to the environment. End the session if this fails."""
        self.last_used, self.disconnected_at = time.monotonic(), None
        try:
            async with asyncio.timeout(_WRITE_SECONDS):
                await self.environment.process.write_line(one_line(body))
        except TimeoutError:
            self.end(f"the environment did not read its input for {_WRITE_SECONDS:g} s{self._end_details()}")
        except (ConnectionError, RuntimeError):
            await asyncio.wait({self._reader}, timeout=1.0)  # the reader reports how the process ended
            if self.ended is None:
                self.end(f"the environment closed its input{self._end_details()}")

    def abandon(self, request_id: RequestId) -> None:
        """Forget a request whose client has disconnected."""
        channel = self._requests.pop(request_id, None)
        if channel is not None:
            self._forget_token(channel)

    def listen(self) -> Channel:
        """Return the stream: the channel of all messages of the environment that belong to no request.

        Raises GatewayError 409 if a client already reads the stream.
        """
        if self._listening:
            raise GatewayError(
                409, "stream", "The stream of this session is already open; a session has only one stream"
            )
        self._listening, self.disconnected_at = True, None
        return self._notifications

    def stop_listening(self) -> None:
        """Record that the client has closed the stream."""
        self._listening = False
        self.last_used = self.disconnected_at = time.monotonic()

    def end(self, reason: str) -> None:
        """Reply to open requests with an error, and call `on_end`, which stops the process."""
        if self.ended is not None:
            return
        self.ended = remove_secrets(reason, [value for _, value in self.launch_request.variables])
        message = f"Session ended: {self.ended}"
        for request_id, channel in self._requests.items():
            error = error_response(request_id, SERVER_ERROR, message, {"reason": "session_ended"})
            channel.close(error, broken=True)
        self._requests.clear()
        self._notifications.close()
        if asyncio.current_task() is not self._reader:
            self._reader.cancel()
        self._on_end(self, self.ended)

    async def _read(self) -> None:
        process = self.environment.process
        reason = ""
        try:
            while (line := await process.read_line()) is not None:
                messages = read_line(line)
                if not messages:
                    process.note_garbage(line)
                for frame, text in messages:
                    self._deliver(frame, text)
        except McpEnvironmentError as fault:
            reason = str(fault)
        except (ValueError, OSError) as error:
            reason = f"cannot read the output of the environment: {error}"
        if not reason and process.fault is not None:
            reason = str(process.fault)
        await process.wait_for_exit()
        self.end(reason or f"the environment exited{self._end_details()}")

    def _deliver(self, frame: JsonRpcMessage, line: bytes) -> None:
        if frame.is_response:
            exact = [frame.id] if frame.id in self._requests else []
            # some servers reply to id 7 with "7"
            similar = (key for key in self._requests if str(key) == str(frame.id))
            request_id = next(iter(exact or similar), None)
            channel = None if request_id is None else self._requests.pop(request_id)
            if channel is not None:  # None if the client has disconnected
                self._forget_token(channel)
                channel.close(line)
            return
        token = frame.progress_token()
        channel = self._tokens.get(token) if token is not None else None
        if channel is None and not self._listening and self._requests:
            # no client reads the stream, so send the message in the response to the newest request
            channel = next(reversed(self._requests.values()))
        (channel or self._notifications).put(line)

    def _forget_token(self, channel: Channel) -> None:
        for token in [token for token, other in self._tokens.items() if other is channel]:
            del self._tokens[token]

    def _end_details(self) -> str:
        end = self.environment.process.describe_end()
        return f" ({end})" if end else ""
