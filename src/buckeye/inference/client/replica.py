"""Client of one inference server: its connections, its state, and calls of its routes."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

from buckeye.errors import InferenceError
from buckeye.inference.types import (
    Generation,
    SamplingParams,
    error_message,
    parse_generation,
    sampling_fields,
)
from buckeye.monitor.metrics import BusyClock

_IDLE_CONNECTIONS = 256  # kept for the next requests
_HEALTH_SECONDS = 5.0

T = TypeVar("T")


class ReplicaLostError(InferenceError):
    """The server ended, restarted or was excluded before it replied. Another server can run the request."""

    code = "BK-INFERENCE-UNREACHABLE"


class ConnectionDroppedError(ReplicaLostError):
    """The connection broke before a reply.

    The server may be healthy. With thousands of simultaneous connections, the operating system resets the
    connections that the server does not accept soon enough.
    """


class ReplyTimeoutError(InferenceError):
    """No reply arrived within the timeout. The server may still be computing the reply."""

    code = "BK-INFERENCE-UNREACHABLE"


class RefusedError(InferenceError):
    """The server replied with an HTTP error."""

    code = "BK-INFERENCE-REQUEST"


class Replica:
    """Client of one inference server. `timeout` is the default time limit of a call, in seconds.

    Every connection uses a separate httpx client, which `connect` returns. With one httpx client for all
    connections, a request would take 19 ms of CPU at 256 connections, and four times as much at twice as
    many. A separate client uses 3 kB.
    """

    def __init__(
        self, index: int, url: str, *, model: str, timeout: float, connect: Callable[[], httpx.AsyncClient]
    ) -> None:
        self.index = index
        self.url = url.rstrip("/").removesuffix("/v1")
        self.is_vllm = False
        """True if the server is vLLM. `check_model` sets it."""
        self.process_id: str | None = None
        """Id of the process that serves the URL. The id changes with every restart of the server."""
        self.dtype: str | None = None
        """Compute dtype of the server; None if the dtype is unknown, or differs between workers."""
        self.version: int | None = None
        """Version of the weights that this client sent last; None for the weights at the server's start."""
        self.adapter: str | None = None
        """Name of the LoRA adapter that this client loaded; None if the server has complete weights."""
        self.down_reason: str | None = None
        """Reason why this client excludes the server from requests; None while the server is used."""
        self.epoch = 0
        """Number of times that the server was excluded."""
        self.max_num_seqs: int | None = None
        """Number of sequences that the server decodes at a time; None if unknown."""
        self.requests_in_flight = self.tokens_in_flight = 0
        """Number of current requests, and the sum of their prompt tokens and `max_tokens`."""
        self.busy_clock = BusyClock()
        self.requests = self.tokens = self.restarts = 0
        """Numbers of completed generations, of their sampled tokens, and of restarts of the server."""
        self.last_reply_at = 0.0
        """Time of the last reply of any kind, on the monotonic clock."""
        self.update_lock = asyncio.Lock()
        """Held during a weight update."""
        self._model = model
        self._timeout = timeout
        self._connect = connect
        self._idle: list[httpx.AsyncClient] = []
        self._in_use: set[httpx.AsyncClient] = set()
        # Health checks have their own connection, because a new one would wait behind thousands of others.
        self._health = connect()
        self._health_lock = asyncio.Lock()
        self._calls: set[asyncio.Timeout] = set()

    @property
    def is_up(self) -> bool:
        """True if requests may be sent to the server."""
        return self.down_reason is None

    @property
    def free_slots(self) -> float:
        """Number of further requests to send to the server. Infinity if `max_num_seqs` is unknown.

        The server gets a quarter more requests than it decodes at a time, so that its queue is never empty.
        """
        if self.max_num_seqs is None:
            return math.inf
        return self.max_num_seqs + math.ceil(self.max_num_seqs / 4) - self.requests_in_flight

    def exclude(self, reason: str) -> None:
        """Exclude the server from further requests. Pending calls raise `ReplicaLostError`."""
        self.down_reason = reason
        self.epoch += 1
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            if not call.expired():
                call.reschedule(now)

    async def close(self) -> None:
        """Close all connections, including those of cancelled calls."""
        for connection in (*self._idle, *self._in_use, self._health):
            await connection.aclose()

    # --- requests ---

    async def is_healthy(self, timeout: float = _HEALTH_SECONDS) -> bool:
        """Return True if the server answers GET /health within `timeout` seconds.

        The engine of the server is not involved, so a busy engine does not delay the answer.
        """
        try:
            async with asyncio.timeout(timeout):
                return (await self._request("GET", "/health", None)).status_code == 200
        except (httpx.TransportError, TimeoutError):
            return False

    async def is_alive(self, timeout: float) -> bool:
        """Return True if the server answers any request within `timeout` seconds.

        Call this after a connection broke. The method sends GET /health; simultaneous calls share one
        request.
        """
        since = time.monotonic()
        async with self._health_lock:
            if self.last_reply_at <= since and self.is_up:
                await self.is_healthy(timeout)
            return self.last_reply_at > since

    async def check_model(self) -> None:
        """Raise `InferenceError` if the server serves another model. Set `is_vllm`."""
        listed = await self.call("GET", "/v1/models")
        owners = self.parse_reply("/v1/models", lambda: {m["id"]: m["owned_by"] for m in listed["data"]})
        if self._model not in owners:
            raise InferenceError(
                f"the server serves {', '.join(owners)}, not {self._model}",
                code="BK-PORT-TAKEN",
                at=self.url,
                hint="check whether the server of another run uses this port",
            )
        self.is_vllm = owners[self._model] == "vllm"

    async def workers(self, *args: str, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return the state of each worker of the server.

        With a directory in `args`, the workers also report the checksum of the weights in this directory. The
        workers reply between two steps of the engine, so a reply proves that the engine works.
        """
        body = {"method": "buckeye_weights", "args": args}
        reply = await self.call("POST", "/collective_rpc", body, timeout=timeout)
        return self.parse_reply("/collective_rpc", lambda: [dict(worker) for worker in reply["results"]])

    async def identify(self, *, timeout: float) -> str:
        """Return the id of the server process, and set `max_num_seqs`. Wait up to `timeout` seconds."""
        workers = await self.workers(timeout=timeout)
        counts = {worker.get("max_num_seqs") for worker in workers}
        self.max_num_seqs = min((n for n in counts if isinstance(n, int) and n > 0), default=None)
        return ",".join(sorted(str(worker.get("process", worker.get("pid"))) for worker in workers))

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str
    ) -> Generation:
        """Sample one sequence. `abort` needs the `request_id`.

        A request to vLLM has no seed. With a seed, vLLM samples each row separately, which is slower, and its
        results still depend on the batch.
        """
        fields = sampling_fields(params)
        if self.is_vllm:
            del fields["seed"]
        return self._count([await self.generate_fields(prompt_ids, fields, request_id=request_id)])[0]

    async def abort(self, request_id: str) -> None:
        """Abort a request if it is running. Its `generate` then returns the tokens sampled so far."""
        # vLLM adds a prefix to the id. Both kinds of servers ignore unknown ids.
        names = [request_id, f"generate-tokens-{request_id}"]
        await self.request("POST", "/abort_requests", {"request_ids": names})

    async def generate_fields(
        self, prompt_ids: Sequence[int], sampling: dict[str, Any], **named: str
    ) -> Generation:
        """Sample one sequence with the given fields of `sampling_params`. Do not add it to the counts."""
        route = "/inference/v1/generate"
        body: dict[str, Any] = {"token_ids": list(prompt_ids), **named}
        body["sampling_params"] = {**sampling, "logprobs": 0}
        version = self.version
        if self.is_vllm:  # vLLM must not reuse the prompts that older weights have computed
            body["cache_salt"] = str(version)
        reply = await self._call_model(route, body)
        generation = self.parse_reply(route, lambda: parse_generation(reply["choices"][0]))
        self._check_versions(generation, version)
        return generation

    async def generate_batch(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Generation]:
        """Sample one sequence for each prompt. Prompt i uses the seed `params.seed` + i."""
        if self.is_vllm:  # vLLM would use one seed for all prompts of a request
            seeded = [dataclasses.replace(params, seed=params.seed + i) for i in range(len(prompts))]
            pairs = zip(prompts, map(sampling_fields, seeded), strict=True)
            return self._count(await gather_results([self.generate_fields(*pair) for pair in pairs]))
        route = "/v1/completions"
        body = {
            "prompt": [list(prompt) for prompt in prompts],
            **sampling_fields(params),
            "logprobs": 0,
            "return_token_ids": True,
            "return_weight_versions": True,
        }
        version = self.version
        reply = await self._call_model(route, body)

        def parse() -> list[Generation]:
            choices = sorted(reply["choices"], key=lambda choice: choice["index"])
            if len(choices) != len(prompts):
                raise ValueError(f"{len(choices)} choices for {len(prompts)} prompts")
            return [parse_generation(choice) for choice in choices]

        generations = self.parse_reply(route, parse)
        for generation in generations:
            self._check_versions(generation, version)
        return self._count(generations)

    async def _call_model(self, route: str, body: dict[str, Any]) -> Any:
        """Call a route that samples, with the name of the loaded adapter, or else of the model.

        Repeat the call if an adapter was loaded meanwhile, because the samples may be from the model without
        the adapter.
        """
        while True:
            adapter = self.adapter
            reply = await self.call("POST", route, {"model": adapter or self._model, **body})
            if self.adapter == adapter:
                return reply

    def _check_versions(self, generation: Generation, version: int | None) -> None:
        """Raise `ReplicaLostError` if weights older than `version` sampled some tokens.

        The server had `version` when the request began. If it uses older weights now, it has restarted.
        """
        if version is not None and min(generation.versions, default=version) < version:
            raise ReplicaLostError(
                f"weights version {min(generation.versions)} sampled some tokens, but the server already had "
                f"version {version}: it was restarted",
                at=self.url,
            )

    def _count(self, generations: list[Generation]) -> list[Generation]:
        self.requests += len(generations)
        self.tokens += sum(len(generation.token_ids) for generation in generations)
        return generations

    # --- calls ---

    async def call(self, method: str, route: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """Send one request and return the JSON value of the reply. Wait up to `timeout` seconds.

        Raise `InferenceError` for an HTTP error, an invalid reply or a timeout. Raise `ReplicaLostError` if
        the connection broke, or the server restarted or was excluded.
        """
        response = await self.request(method, route, body, timeout=timeout)
        return self.parse_reply(route.partition("?")[0], response.json)

    async def request(
        self, method: str, route: str, body: Any = None, *, timeout: float | None = None
    ) -> httpx.Response:
        """Send one request and return the response. Wait up to `timeout` seconds.

        Raise `InferenceError` for an HTTP error or a timeout. Raise `ReplicaLostError` if the connection
        broke, or the server restarted or was excluded.
        """
        path = route.partition("?")[0]
        started, epoch = time.monotonic(), self.epoch
        seconds = self._timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds) as deadline:
                self._calls.add(deadline)
                try:
                    response = await self._request(method, route, body)
                finally:
                    self._calls.discard(deadline)
        except TimeoutError:
            if self.epoch != epoch:
                raise ReplicaLostError(f"the server is down: {self.down_reason}", at=self.url) from None
            raise ReplyTimeoutError(
                f"no reply to {method} {path} within {seconds:g} s", at=self.url
            ) from None
        except httpx.TransportError as error:
            waited = time.monotonic() - started
            reason = str(error) or type(error).__name__
            raise ConnectionDroppedError(
                f"connection lost in {method} {path} after {waited:.1f} s: {reason}", at=self.url
            ) from error
        if response.status_code != 200:
            await self._raise_refusal(method, path, response)
        return response

    async def _raise_refusal(self, method: str, path: str, response: httpx.Response) -> None:
        status = response.status_code
        message = f"{method} {path} was refused with status {status}: {error_message(response)}"
        lacks_adapter = status == 404 and self.adapter is not None  # a restarted process has no adapter
        is_lost = lacks_adapter or status == 503
        if is_lost or (status >= 500 and not await self.is_healthy()):
            raise ReplicaLostError(message, at=self.url)
        raise RefusedError(message, code="BK-INFERENCE" if status >= 500 else None, at=self.url)

    def parse_reply(self, route: str, parse: Callable[[], T]) -> T:
        """Return the result of `parse` on a reply. Raise `InferenceError` if the reply is malformed."""
        try:
            return parse()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise InferenceError(
                f"invalid reply to {route}: {error!r}", code="BK-INFERENCE-REPLY", at=self.url
            ) from error

    async def _request(self, method: str, route: str, body: Any) -> httpx.Response:
        async with self._connection(route) as connection:
            response = await connection.request(method, f"{self.url}{route}", json=body)
        self.last_reply_at = time.monotonic()
        return response

    @asynccontextmanager
    async def _connection(self, route: str) -> AsyncIterator[httpx.AsyncClient]:
        """Yield a connection that no other request uses."""
        if route == "/health":
            yield self._health
            return
        connection = self._idle.pop() if self._idle else self._connect()
        self._in_use.add(connection)
        try:
            yield connection
        finally:
            self._in_use.remove(connection)
            if len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(connection)
            else:
                await connection.aclose()


async def gather_results(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Return all results in order. Wait for every call to end, then raise the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    values: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values
