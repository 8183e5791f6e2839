"""The client of one or several inference servers that speak the contract. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from buckeye.errors import InferenceError
from buckeye.inference.types import Generation, SamplingParams

__all__ = ["Generation", "InferenceClient", "SamplingParams"]

_POLL_SECONDS = 0.1
_CONNECT_ATTEMPTS = 6
_FIRST_BACKOFF = 0.1
_SHOWN_BODY = 500
_POOLS = 32

T = TypeVar("T")


class _Replica:
    """One server. Its connections are spread over several pools, because what a pool of httpx does for a
    request grows with the square of its connections (128 in one pool: 17 ms of CPU a request; in 32: 1
    ms)."""

    def __init__(self, url: str, make_pool: Callable[[], httpx.AsyncClient]) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.in_flight = 0
        self.is_vllm = False
        """Known once it is ready. vLLM gives all prompts of one request the same seed."""
        self._pools = [make_pool() for _ in range(_POOLS)]
        self._loads = [0] * _POOLS

    async def request(self, method: str, route: str, body: Any = None) -> httpx.Response:
        """One request on the pool with the fewest."""
        index = self._loads.index(min(self._loads))
        self._loads[index] += 1
        try:
            return await self._pools[index].request(method, f"{self.url}{route}", json=body)
        finally:
            self._loads[index] -= 1

    async def close(self) -> None:
        for pool in self._pools:
            await pool.aclose()


class InferenceClient:
    """An async context manager. `timeout` is the deadline of every call, in seconds; `model` the name that
    the servers must serve. All methods raise `InferenceError`, which names the server, what was asked and how
    long it was waited for."""

    def __init__(self, base_urls: Sequence[str], *, api_key: str | None, timeout: float, model: str) -> None:
        if not base_urls:
            raise InferenceError("No inference server is configured: client.base_url is empty.")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        certificates = httpx.create_ssl_context()

        def make_pool() -> httpx.AsyncClient:
            return httpx.AsyncClient(
                headers=headers, limits=limits, timeout=None, trust_env=False, verify=certificates
            )

        self._timeout = timeout
        self._model = model
        self._replicas = [_Replica(url, make_pool) for url in base_urls]

    async def __aenter__(self) -> InferenceClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for replica in self._replicas:
            await replica.close()

    async def wait_ready(self, timeout: float) -> None:
        """Wait until every server is healthy, at most `timeout` seconds, and check that it serves the
        model."""
        await self._on_all(lambda replica: self._wait_ready(replica, timeout))

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Sample one sequence on the server that has the fewest in flight."""
        return await self._generate_one(min(self._replicas, key=lambda r: r.in_flight), prompt_ids, params)

    async def _generate_one(
        self, replica: _Replica, prompt_ids: Sequence[int], params: SamplingParams
    ) -> Generation:
        body = {
            "model": self._model,
            "token_ids": list(prompt_ids),
            "sampling_params": {**_sampling_fields(params), "logprobs": 0},
        }
        replica.in_flight += 1
        try:
            answer = await self._post(replica, "/inference/v1/generate", body)
        finally:
            replica.in_flight -= 1
        return _parsed(replica, "/inference/v1/generate", lambda: _generation_of(answer["choices"][0]))

    async def generate_wave(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Generation]:
        """Sample one sequence for each prompt, all sent at once; sequence i uses the seed `params.seed` + i.

        Server r gets the r-th contiguous part, so the same wave always reaches the same engines in the same
        order.
        """
        bounds = [len(prompts) * r // len(self._replicas) for r in range(len(self._replicas) + 1)]
        parts = zip(self._replicas, bounds, bounds[1:], strict=False)
        waves = [
            self._generate_part(replica, prompts[start:end], params, start)
            for replica, start, end in parts
            if end > start
        ]
        return [generation for part in await _gather(waves) for generation in part]

    async def update_weights(self, path: Path, version: int, checksum: str) -> None:
        """Bring all servers, concurrently, to the weights in `path`; running requests go on under them. Each
        must echo version and checksum afterwards."""
        await self._on_all(lambda replica: self._update(replica, path, version, checksum))

    async def weight_versions(self) -> list[int]:
        """The policy version of every server."""
        infos = await self._on_all(lambda replica: self._get(replica, "/weight_info"))
        return [
            _parsed(replica, "/weight_info", lambda info=info: _version(info["weight_version"]))  # type: ignore[misc]
            for replica, info in zip(self._replicas, infos, strict=True)
        ]

    async def _generate_part(
        self, replica: _Replica, prompts: Sequence[Sequence[int]], params: SamplingParams, start: int
    ) -> list[Generation]:
        if replica.is_vllm:
            seeded = [dataclasses.replace(params, seed=params.seed + start + i) for i in range(len(prompts))]
            pairs = zip(prompts, seeded, strict=True)
            return await _gather([self._generate_one(replica, prompt, own) for prompt, own in pairs])
        body = {
            "model": self._model,
            "prompt": [list(prompt) for prompt in prompts],
            **_sampling_fields(params),
            "seed": params.seed + start,
            "logprobs": 0,
            "return_token_ids": True,
            "return_weight_versions": True,
        }
        replica.in_flight += len(prompts)
        try:
            answer = await self._post(replica, "/v1/completions", body)
        finally:
            replica.in_flight -= len(prompts)

        def parse() -> list[Generation]:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if len(choices) != len(prompts):
                raise ValueError(f"{len(choices)} choices for {len(prompts)} prompts")
            return [_generation_of(choice) for choice in choices]

        return _parsed(replica, "/v1/completions", parse)

    async def _wait_ready(self, replica: _Replica, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not await self._healthy(replica, deadline):
            if time.monotonic() >= deadline:
                raise InferenceError(
                    f"{replica.url} did not answer GET /health within {timeout:g} s: "
                    "is the inference server running?"
                )
            await asyncio.sleep(_POLL_SECONDS)
        listed = await self._get(replica, "/v1/models")
        owners = _parsed(replica, "/v1/models", lambda: {m["id"]: m["owned_by"] for m in listed["data"]})
        if self._model not in owners:
            raise InferenceError(
                f"{replica.url} serves {', '.join(owners)}, not {self._model}: "
                "another run's server on the same port?"
            )
        replica.is_vllm = owners[self._model] == "vllm"

    async def _healthy(self, replica: _Replica, deadline: float) -> bool:
        try:
            async with asyncio.timeout(max(0.1, min(5.0, deadline - time.monotonic()))):
                return (await replica.request("GET", "/health")).status_code == 200
        except (httpx.TransportError, TimeoutError):
            return False

    async def _update(self, replica: _Replica, path: Path, version: int, checksum: str) -> None:
        # Without clear_cache, requests with a known prefix would go on from keys of the old weights.
        await self._post(replica, "/pause?mode=keep&clear_cache=true", None)
        try:
            await self._post(replica, "/init_weight_transfer_engine", {"init_info": {}})
            await self._post(replica, "/start_weight_update", None)
            await self._post(replica, "/update_weights", {"update_info": {"path": str(path.absolute())}})
            await self._check_incoming(replica, checksum)
            await self._post(replica, "/finish_weight_update", {"weight_version": str(version)})
        except BaseException:
            with contextlib.suppress(InferenceError):  # the first error is the one to tell
                await self._post(replica, "/resume", None)
            raise
        await self._post(replica, "/resume", None)
        info = await self._get(replica, "/weight_info")
        echoed = {worker.get("checksum") for worker in await self._workers(replica)}
        if (str(info.get("weight_version")), echoed) != (str(version), {checksum}):
            shown = ", ".join(str(one)[:12] for one in echoed)
            raise InferenceError(
                f"{replica.url} was updated to version {version} (checksum {checksum[:12]}) and reports "
                f"version {info.get('weight_version')} (checksum {shown})."
            )

    async def _check_incoming(self, replica: _Replica, checksum: str) -> None:
        """Before they are used: whether every worker of a server has loaded the weights meant."""
        for worker in await self._workers(replica):
            if worker.get("incoming") != checksum:
                why = worker.get("problem") or f"it has {str(worker.get('incoming'))[:12]}"
                raise InferenceError(f"{replica.url} did not load the weights {checksum[:12]}: {why}.")

    async def _workers(self, replica: _Replica) -> list[dict[str, Any]]:
        """What the workers of a server say about their weights."""
        answer = await self._post(replica, "/collective_rpc", {"method": "buckeye_weights"})
        return _parsed(replica, "/collective_rpc", lambda: [dict(worker) for worker in answer["results"]])

    async def _get(self, replica: _Replica, route: str) -> Any:
        return await self._send(replica, "GET", route, None)

    async def _post(self, replica: _Replica, route: str, body: Any) -> Any:
        return await self._send(replica, "POST", route, body)

    async def _send(self, replica: _Replica, method: str, route: str, body: Any) -> Any:
        """One call within the deadline. Only what fails before the request is out is tried again."""
        path = route.partition("?")[0]
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._connected(replica, method, route, body)
        except TimeoutError:
            raise InferenceError(
                f"{replica.url} did not answer {method} {path} within {self._timeout:g} s."
            ) from None
        except httpx.TransportError as error:
            waited = time.monotonic() - started
            reason = str(error) or type(error).__name__
            raise InferenceError(
                f"{replica.url} failed in {method} {path} after {waited:.1f} s: {reason}"
            ) from error
        if response.status_code != 200:
            raise InferenceError(
                f"{replica.url} refused {method} {path} with {response.status_code}: "
                f"{_error_message(response)}"
            )
        return _parsed(replica, path, response.json)

    async def _connected(self, replica: _Replica, method: str, route: str, body: Any) -> httpx.Response:
        for attempt in range(_CONNECT_ATTEMPTS):
            try:
                return await replica.request(method, route, body)
            except httpx.ConnectError:
                if attempt == _CONNECT_ATTEMPTS - 1:
                    raise
            await asyncio.sleep(_FIRST_BACKOFF * 2**attempt)
        raise AssertionError("unreachable")

    async def _on_all(self, call: Callable[[_Replica], Awaitable[T]]) -> list[T]:
        return await _gather([call(replica) for replica in self._replicas])


async def _gather(calls: Sequence[Awaitable[T]]) -> list[T]:
    """All results in order. Waits for every call to end, then raises the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    values: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values


def _sampling_fields(params: SamplingParams) -> dict[str, Any]:
    return {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": params.seed,
        "min_tokens": params.min_tokens,
        "stop_token_ids": list(params.stop_token_ids),
    }


def _version(named: str | int) -> int:
    """A policy version. vLLM calls the weights it was started with `default`."""
    return 0 if named == "default" else int(named)


def _generation_of(choice: dict[str, Any]) -> Generation:
    """From a choice of either route. Raises `KeyError`, `TypeError` or `ValueError` if it is not one."""
    token_ids, logprobs = choice["token_ids"], choice["logprobs"]
    values = (
        logprobs["token_logprobs"]
        if "token_logprobs" in logprobs
        else [e["logprob"] for e in logprobs["content"]]
    )
    versions: list[int] = []
    for span in choice["weight_versions"]:
        versions += [_version(span["version"])] * (span["end"] - span["start"])
    if not len(token_ids) == len(values) == len(versions):
        raise ValueError(f"{len(token_ids)} tokens, {len(values)} log-probs, {len(versions)} versions")
    if choice["finish_reason"] not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {choice['finish_reason']!r}")
    return Generation(
        token_ids=token_ids, logprobs=values, versions=versions, finish_reason=choice["finish_reason"]
    )


def _parsed(replica: _Replica, route: str, parse: Callable[[], T]) -> T:
    try:
        return parse()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InferenceError(
            f"{replica.url} answered {route} with something unexpected: {error!r}"
        ) from error


def _error_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:_SHOWN_BODY] or "no message"
