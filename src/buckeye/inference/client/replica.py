"""One inference server from the client's view: connections, state, and calls."""

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
_HEALTH_SECONDS = 5.0  # for a server in unknown state

T = TypeVar("T")


class ReplicaLostError(InferenceError):
    """The server died, restarted or was taken out before it replied.

    The request can be retried on another server.
    """

    code = "BK-INFERENCE-UNREACHABLE"


class ConnectionDroppedError(ReplicaLostError):
    """The connection broke before a reply.

    The server may be healthy: under thousands of simultaneous connections, the system resets those that are
    not accepted soon enough.
    """


class ReplyTimeoutError(InferenceError):
    """No reply arrived within the timeout. The server may still compute a long reply."""

    code = "BK-INFERENCE-UNREACHABLE"


class RefusedError(InferenceError):
    """The server replied with a refusal."""

    code = "BK-INFERENCE-REQUEST"


class Replica:
    """One inference server. `timeout` is the deadline of a call, in seconds.

    Every connection has a separate httpx client from `connect`. In one httpx client the cost of a request
    grows with the square of the connections (19 ms of CPU at 256). A separate client takes only 3 kB.
    """

    def __init__(
        self, index: int, url: str, *, model: str, timeout: float, connect: Callable[[], httpx.AsyncClient]
    ) -> None:
        self.index = index
        self.url = url.rstrip("/").removesuffix("/v1")
        self.is_vllm = False
        """Set once the server is ready. vLLM gives all prompts of one request the same seed."""
        self.process_id: str | None = None
        """Id of the server process behind the URL; it changes with every restart."""
        self.dtype: str | None = None
        """Compute dtype of the server; None if it is unknown, or differs between workers."""
        self.version: int | None = None
        """Version of the weights that the server was given last."""
        self.adapter: str | None = None
        """Name of the LoRA adapter that the server was given; None if it has complete weights."""
        self.down_reason: str | None = None
        """Reason why the server is not used; None while it is used."""
        self.epoch = 0
        """Number of times the server was taken out."""
        self.max_num_seqs: int | None = None
        """Number of requests that the server computes at a time; None if unknown."""
        self.requests_in_flight = self.tokens_in_flight = 0
        """Current requests, and the sum of their prompt tokens and `max_tokens`."""
        self.busy_clock = BusyClock()
        self.requests = self.tokens = self.restarts = 0
        """Completed generations, their sampled tokens, and the number of restarts."""
        self.last_reply_at = 0.0
        """Time of the last reply of any kind, on the monotonic clock."""
        self.update_lock = asyncio.Lock()
        """Held during a weight update."""
        self._model = model
        self._timeout = timeout
        self._connect = connect
        self._idle: list[httpx.AsyncClient] = []
        self._in_use: set[httpx.AsyncClient] = set()
        self._health = connect()  # for health checks only: a new connection waits behind thousands of others
        self._health_lock = asyncio.Lock()
        self._calls: set[asyncio.Timeout] = set()

    @property
    def is_up(self) -> bool:
        """True if requests may be sent to the server."""
        return self.down_reason is None

    @property
    def free_slots(self) -> float:
        """Number of further requests that the server should get.

        The server gets a quarter more requests than it computes at a time, so that it never waits for the
        client.
        """
        if self.max_num_seqs is None:
            return math.inf
        return self.max_num_seqs + math.ceil(self.max_num_seqs / 4) - self.requests_in_flight

    def exclude(self, reason: str) -> None:
        """Stop using the server. Pending calls raise `ReplicaLostError`."""
        self.down_reason = reason
        self.epoch += 1
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            if not call.expired():
                call.reschedule(now)

    async def close(self) -> None:
        """Close all connections, also those of calls that were cancelled."""
        for connection in (*self._idle, *self._in_use, self._health):
            await connection.aclose()

    # --- requests ---

    async def is_healthy(self, timeout: float = _HEALTH_SECONDS) -> bool:
        """Return True if the server answers GET /health within `timeout` seconds.

        This does not involve its engine, which may be busy.
        """
        try:
            async with asyncio.timeout(timeout):
                return (await self._request("GET", "/health", None)).status_code == 200
        except (httpx.TransportError, TimeoutError):
            return False

    async def is_alive(self, timeout: float) -> bool:
        """Return True if the server still answers after a connection to it broke.

        Checks GET /health within `timeout` seconds; any answer counts. Simultaneous calls share one check.
        """
        since = time.monotonic()
        async with self._health_lock:
            if self.last_reply_at <= since and self.is_up:
                await self.is_healthy(timeout)
            return self.last_reply_at > since

    async def check_model(self) -> None:
        """Raise `InferenceError` if the server has another model. Detect whether it is vLLM."""
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

        With a directory in `args`, workers also report the weights in that directory. They reply between two
        steps of the engine, so a reply also proves that the engine is alive.
        """
        body = {"method": "buckeye_weights", "args": args}
        reply = await self.call("POST", "/collective_rpc", body, timeout=timeout)
        return self.parse_reply("/collective_rpc", lambda: [dict(worker) for worker in reply["results"]])

    async def identify(self, *, timeout: float) -> str:
        """Return the id of the server process, within `timeout` seconds, and set `max_num_seqs`."""
        workers = await self.workers(timeout=timeout)
        counts = {worker.get("max_num_seqs") for worker in workers}
        self.max_num_seqs = min((n for n in counts if isinstance(n, int) and n > 0), default=None)
        return ",".join(sorted(str(worker.get("process", worker.get("pid"))) for worker in workers))

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str
    ) -> Generation:
        """Sample one sequence; `request_id` is the id for `abort`.

        vLLM gets no seed: a seed makes it sample row by row, and its results depend on the batch anyway.
        """
        fields = sampling_fields(params)
        if self.is_vllm:
            del fields["seed"]
        return self._count([await self.generate_fields(prompt_ids, fields, request_id=request_id)])[0]

    async def abort(self, request_id: str) -> None:
        """Abort a request, if the server has it. Its partial result is returned to the caller."""
        # vLLM derives its own name from this id; both servers ignore unknown ids
        names = [request_id, f"generate-tokens-{request_id}"]
        await self.request("POST", "/abort_requests", {"request_ids": names})

    async def generate_fields(
        self, prompt_ids: Sequence[int], sampling: dict[str, Any], **named: str
    ) -> Generation:
        """Sample one sequence with the given fields of `sampling_params`. It is not counted."""
        route = "/inference/v1/generate"
        body: dict[str, Any] = {"token_ids": list(prompt_ids), **named}
        body["sampling_params"] = {**sampling, "logprobs": 0}
        version = self.version
        reply = await self._call_model(route, body)
        generation = self.parse_reply(route, lambda: parse_generation(reply["choices"][0]))
        self._check_versions(generation, version)
        return generation

    async def generate_batch(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Generation]:
        """Sample one sequence for each prompt, all sent at once; sequence i uses seed `params.seed` + i."""
        if self.is_vllm:
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
        """Call the model, with the adapter that the server was given.

        Repeat the call if the first adapter arrived meanwhile: samples for the model's own name may be
        without the adapter.
        """
        while True:
            adapter = self.adapter
            reply = await self.call("POST", route, {"model": adapter or self._model, **body})
            if self.adapter == adapter:
                return reply

    def _check_versions(self, generation: Generation, version: int | None) -> None:
        """Raise `ReplicaLostError` if tokens are older than the weights `version`.

        A server with older weights than it was given has restarted.
        """
        if version is not None and min(generation.versions, default=version) < version:
            raise ReplicaLostError(
                f"tokens have weights version {min(generation.versions)}, but the server was given version "
                f"{version}: it was restarted",
                at=self.url,
            )

    def _count(self, generations: list[Generation]) -> list[Generation]:
        self.requests += len(generations)
        self.tokens += sum(len(generation.token_ids) for generation in generations)
        return generations

    # --- calls ---

    async def call(self, method: str, route: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """Make one call within `timeout` seconds and return the JSON value of the reply.

        Raise `InferenceError` for a refusal, an invalid reply or a timeout, `ReplicaLostError` if the server
        is lost.
        """
        response = await self.request(method, route, body, timeout=timeout)
        return self.parse_reply(route.partition("?")[0], response.json)

    async def request(
        self, method: str, route: str, body: Any = None, *, timeout: float | None = None
    ) -> httpx.Response:
        """Make one call within `timeout` seconds and return the response unparsed.

        Raise `InferenceError` for a refusal or a timeout, `ReplicaLostError` if the server is lost.
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
        """Yield a connection without other requests."""
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
