"""Routes that monitor and control the server. Their paths are those of vLLM's server."""

from __future__ import annotations

import asyncio
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from buckeye.base.faults import fault_point
from buckeye.base.foreign_files import data_folder
from buckeye.chat.openai_api import InvalidRequestError, parse_request
from buckeye.errors import TransportError, UsageError, first_line
from buckeye.inference.engine.adapters import AdaptedCheckpoint
from buckeye.inference.engine.engine import PauseMode, SleepTag
from buckeye.inference.engine.general_spec import read_served_spec
from buckeye.inference.engine.weights import (
    Checkpoint,
    DecoderWeights,
    LoadableWeights,
    ReceivedCheckpoint,
)
from buckeye.inference.server.protocol import (
    AbortRequest,
    BroadcastInfo,
    FinishUpdateRequest,
    LoadAdapterRequest,
    RpcRequest,
    UnloadAdapterRequest,
    UpdateRequest,
    WeightVersionRequest,
)
from buckeye.inference.server.responses import json_response, read_body
from buckeye.inference.server.service import Service
from buckeye.transport.broadcast_group import BroadcastGroup, split_safetensors
from buckeye.transport.weights import (
    WeightsManifest,
    combined_checksum,
    find_weights_manifest,
    verify_weights,
)
from buckeye.transport.weights_digest import digest_contents

PAUSE_QUERY = {
    "mode": {"enum": list(get_args(PauseMode)), "default": "abort"},
}
"""JSON Schema of each query parameter of /pause."""
_SLEEP_LEVELS: dict[str, Literal["move", "drop"] | None] = {"0": None, "1": "move", "2": "drop"}
"""Effect of a level of /sleep on the weights. Level 0 only pauses."""
SLEEP_QUERY = {"level": {"enum": [0, 1, 2], "default": 1}, **PAUSE_QUERY}
WAKE_QUERY = {"tags": {"type": "array", "items": {"enum": list(get_args(SleepTag))}}}

_PROCESS = secrets.token_hex(8)
"""Unique id of this process. A pid is not unique, because a later process may get the same number."""


async def health(service: Service, request: Request) -> Response:
    """Return status 200, or 503 during shutdown."""
    return Response(status_code=503 if service.draining else 200)


async def models(service: Service, request: Request) -> Response:
    """List the model, the loaded adapter and the short name, in OpenAI's format."""
    names = dict.fromkeys(
        name for name in (service.model_name, service.adapter, service.short_model_name) if name
    )
    return json_response({"object": "list", "data": [_model(service, name) for name in names]})


async def model(service: Service, request: Request) -> Response:
    """Return the model named in the path."""
    name = request.path_params["model"]
    service.check_model(name)
    return json_response(_model(service, name))


async def metrics(service: Service, request: Request) -> Response:
    """Return metrics as Prometheus text. Names that begin with `vllm:` have vLLM's meaning."""
    engine = service.engine
    counters = engine.counters
    values = {
        "vllm:num_requests_running": len(engine.running),
        "vllm:num_requests_waiting": len(engine.waiting),
        "vllm:kv_cache_usage_perc": engine.running.usage,
        "buckeye:generation_tokens_per_second": engine.tokens_per_second,
        "buckeye:weight_version": engine.version,
        "buckeye:paused": int(engine.is_paused),
        "buckeye:asleep": int(bool(engine.released)),
        "vllm:prompt_tokens_total": counters["prompt_tokens"],
        "buckeye:prefill_tokens_total": counters["prefill_tokens"],
        "vllm:generation_tokens_total": counters["generation_tokens"],
    }
    lines = []
    for name, value in values.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE {name} {kind}", f"{name} {value}"]
    lines.append("# TYPE vllm:request_success_total counter")
    for reason in ("stop", "length", "abort"):
        lines.append(
            f'vllm:request_success_total{{finished_reason="{reason}"}} {counters[f"finished_{reason}"]}'
        )
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


async def pause(service: Service, request: Request) -> Response:
    """Stop decoding: `mode` keeps running requests, waits for them, or aborts all requests."""
    await _pause(service, request)
    return json_response({"status": "paused"})


async def _pause(service: Service, request: Request) -> None:
    mode = request.query_params.get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise InvalidRequestError(f"`mode` must be keep, wait or abort, not {mode!r}")
    await asyncio.wrap_future(service.engine.pause(mode))  # type: ignore[arg-type]


async def resume(service: Service, request: Request) -> Response:
    """Resume decoding."""
    await asyncio.wrap_future(service.engine.resume())
    return json_response({"status": "resumed"})


async def is_paused(service: Service, request: Request) -> Response:
    """Return `is_paused`: true between a pause and the next resume."""
    return json_response({"is_paused": service.engine.is_paused})


async def sleep(service: Service, request: Request) -> Response:
    """Pause, and free memory. Level 1 moves the weights to main memory, level 2 drops them."""
    level = request.query_params.get("level", "1")
    if level not in _SLEEP_LEVELS:
        raise InvalidRequestError(f"`level` must be 0, 1 or 2, not {level!r}")
    await _pause(service, request)
    weights = _SLEEP_LEVELS[level]
    if weights is not None:
        await asyncio.wrap_future(service.engine.release(weights=weights))
    return json_response({"status": "sleeping", "level": int(level)})


async def release_kv_cache_memory(service: Service, request: Request) -> Response:
    """Free the memory of the KV cache of a paused engine, and keep the weights."""
    await asyncio.wrap_future(service.engine.release())
    return json_response({"status": "kv_cache_released"})


async def wake_up(service: Service, request: Request) -> Response:
    """Restore the memory named by `tags`, or all memory. Decoding resumes when all memory is restored."""
    tags = request.query_params.getlist("tags")
    unknown = set(tags) - set(get_args(SleepTag))
    if unknown:
        raise InvalidRequestError(f"`tags` must be weights or kv_cache, not {min(unknown)!r}")
    is_awake = await asyncio.wrap_future(
        service.engine.wake_up(tags or get_args(SleepTag))  # type: ignore[arg-type]
    )
    return json_response({"status": "awake" if is_awake else "sleeping", "tags": tags or None})


async def is_sleeping(service: Service, request: Request) -> Response:
    """Return `is_sleeping`: true while the engine is paused or has released memory."""
    return json_response({"is_sleeping": service.engine.is_paused})


class WeightUpdate:
    """Routes of a weight update. A client calls `start`, `update` and `finish`.

    `update` checks and reads the new weights, while the engine uses the old ones. Only `finish` changes the
    engine. So an invalid directory, or a client that ends before `finish`, changes nothing.
    """

    def __init__(self) -> None:
        self._checked: tuple[LoadableWeights, WeightsManifest] | None = None
        self._starts = 0

    async def start(self, service: Service, request: Request) -> Response:
        """Start a weight update. An earlier update that is not finished is dropped."""
        self._checked = None
        self._starts += 1
        return json_response({"status": "started"})

    async def update(self, service: Service, request: Request) -> Response:
        """Check new weights (manifest, checksums, architecture, shapes) and read or receive them."""
        info, start = parse_request(await read_body(request), UpdateRequest).update_info, self._starts
        if info.broadcast is None:
            checked = await asyncio.to_thread(_open_weights, service, info.path)
        else:
            checked = await asyncio.to_thread(_receive_weights, service, Path(info.path), info.broadcast)
        if self._starts != start:
            raise InvalidRequestError("another weight update was started", hint="retry this update")
        self._checked = checked
        return json_response({"status": "updated", "checksum": checked[1].checksum})

    async def finish(self, service: Service, request: Request) -> Response:
        """Replace the engine's weights by the new ones, and set the version of the weights.

        The default version is the step in the manifest of the new weights.
        """
        body = parse_request(await read_body(request), FinishUpdateRequest)
        if self._checked is None:
            raise InvalidRequestError(
                "cannot finish the weight update: no weights were loaded since /start_weight_update",
                hint="POST /update_weights first",
            )
        weights, manifest = self._checked
        version = _parse_version(body.weight_version, manifest.step, "weight_version")
        fault_point("weights.swap")
        await asyncio.wrap_future(
            service.engine.install_weights(weights, version, keep_kv_cache=body.keep_kv_cache)
        )
        fault_point("weights.swapped")
        service.checksum, service.adapter = manifest.checksum, None
        self._checked = None
        return json_response({"status": "finished", "weight_version": str(version)})

    async def rpc(self, service: Service, request: Request) -> Response:
        """Return the state of the server process and its weights (method `buckeye_weights`).

        The optional argument is a weights directory. With it, the reply also has the checksum from its
        manifest file.
        """
        body = parse_request(await read_body(request), RpcRequest)
        if body.method != "buckeye_weights":
            raise InvalidRequestError(f"`method` must be buckeye_weights, not {body.method!r}")
        await asyncio.wrap_future(service.engine.ping())
        incoming = self._checked[1].checksum if self._checked is not None else None
        published = find_weights_manifest(Path(str(body.args[0]))) if body.args else None
        worker = {
            "checksum": service.checksum,
            "incoming": incoming,
            "problem": None,
            "pid": os.getpid(),
            "process": _PROCESS,
            "dtype": service.dtype,
            "max_num_seqs": service.engine.running.slots,
            "can_sleep": True,
            "can_receive": isinstance(service.engine.decoder.weights, DecoderWeights),
            "published": published and published.checksum,
        }
        return json_response({"results": [worker]})


async def weight_info(service: Service, request: Request) -> Response:
    """Return version, checksum, model and dtype of the current weights.

    The checksum is null before the first update.
    """
    return json_response(
        {
            "weight_version": str(service.engine.version),
            "checksum": service.checksum,
            "model": service.model_name,
            "dtype": service.dtype,
        }
    )


async def update_weight_version(service: Service, request: Request) -> Response:
    """Set the version of the current weights."""
    requested = parse_request(await read_body(request), WeightVersionRequest).new_version
    version = _parse_version(requested, service.engine.version, "new_version")
    await asyncio.wrap_future(service.engine.set_version(version))
    return json_response({"success": True, "new_version": str(version)})


class AdapterRoutes:
    """Routes that load and unload a LoRA adapter.

    The server applies one adapter at a time, to the model that it was started with. Requests may then use
    the name of the model or of the adapter, and both get the adapted weights. The version of the weights
    does not change until a client calls /update_weight_version.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def load(self, service: Service, request: Request) -> Response:
        """Apply a LoRA adapter to the weights.

        If the adapter has a manifest, the server checks the files against it.
        """
        body = parse_request(await read_body(request), LoadAdapterRequest)
        async with self._lock:
            _check_adapter_name(service, body)
            folder = _weights_folder(service, body.lora_path)
            checkpoint = await asyncio.to_thread(AdaptedCheckpoint, service.directory, folder)
            await _install(service, checkpoint, keep_kv_cache=body.keep_kv_cache)
            service.checksum, service.adapter = checkpoint.checksum, body.lora_name
        return json_response({"status": "loaded", "checksum": checkpoint.checksum})

    async def unload(self, service: Service, request: Request) -> Response:
        """Unload the LoRA adapter, and restore the weights that the server was started with."""
        name = parse_request(await read_body(request), UnloadAdapterRequest).lora_name
        async with self._lock:
            if name != service.adapter:
                raise HTTPException(404, f"no LoRA adapter named {name!r} is loaded")
            await _install(service, Checkpoint(service.directory))
            service.checksum, service.adapter = None, None
        return json_response({"status": "unloaded"})


def _check_adapter_name(service: Service, body: LoadAdapterRequest) -> None:
    name, loaded = body.lora_name, service.adapter
    if name == service.model_name:
        raise InvalidRequestError(
            f"`lora_name` is {name!r}, the name of the served model", hint="choose another name"
        )
    if loaded is not None and loaded != name:
        raise InvalidRequestError(
            f"cannot load the adapter {name!r}: {loaded!r} is loaded, and the server applies one at a time",
            hint="POST /v1/unload_lora_adapter first",
        )
    if loaded is not None and not body.load_inplace:
        raise InvalidRequestError(
            f"the adapter {loaded!r} is loaded already", hint="send `load_inplace`: true to replace it"
        )


async def _install(service: Service, checkpoint: Checkpoint, *, keep_kv_cache: bool = False) -> None:
    """Replace the engine's weights and keep their version."""
    weights = service.engine.decoder.weights
    prepared = await asyncio.to_thread(weights.prepare, checkpoint)
    await asyncio.wrap_future(
        service.engine.install_weights(prepared, service.engine.version, keep_kv_cache=keep_kv_cache)
    )


async def abort_requests(service: Service, request: Request) -> Response:
    """Abort the requests with the given ids. Without ids, abort all requests."""
    body = parse_request(await read_body(request), AbortRequest)
    ids = list(service.requests) if body.request_ids is None else body.request_ids
    known = [request_id for request_id in ids if request_id in service.requests]
    service.engine.abort([sequence for request_id in known for sequence in service.requests[request_id]])
    return json_response({"aborted": known})


def _open_weights(service: Service, path: str) -> tuple[LoadableWeights, WeightsManifest]:
    """Check and read the weights in `path`. Return them with their manifest.

    One thread reads the weights while another one computes their checksums.
    """
    directory = _weights_folder(service, path)
    with ThreadPoolExecutor(1, "verify") as verifier:
        verified = verifier.submit(verify_weights, directory)
        try:
            prepared = _prepare(service, directory)
        finally:
            manifest = verified.result()  # raise its error, if any, instead of an error of `_prepare`
    return prepared, manifest


def _receive_weights(
    service: Service, path: Path, info: BroadcastInfo
) -> tuple[LoadableWeights, WeightsManifest]:
    """Receive new weights in memory and check them. Return them with their manifest.

    `path` is the directory of their files, which may not exist yet.
    """
    weights, digests = service.engine.decoder.weights, info.manifest.files
    if not isinstance(weights, DecoderWeights) or combined_checksum(digests) != info.manifest.checksum:
        raise InvalidRequestError("the server cannot receive these weights")
    store = _weights_folder(service, str(Path(info.store).parent)) / Path(info.store).name
    fault_point("broadcast.join")
    try:
        group = BroadcastGroup(store, info.rank, info.size, loopback=info.loopback, seconds=info.seconds)
        fault_point("broadcast.receive")
        files = group.receive(info.sizes, info.shared, copies=weights.device.type == "cpu")
        if digest_contents({name: memoryview(file.numpy()) for name, file in files.items()}) != digests:
            raise ValueError("their digest differs from the published one")
        tensors = [tensor for file in files.values() for tensor in split_safetensors(file).items()]
        checkpoint = ReceivedCheckpoint(path, dict(tensors))
        weights.check(checkpoint)
        prepared = weights.prepare(checkpoint)
        group.finish()
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        message = f"the weights were not received: {first_line(error)}"
        raise TransportError(message, code="BK-WEIGHTS-UPDATE") from error
    fault_point("broadcast.received")
    return prepared, info.manifest


def _weights_folder(service: Service, path: str) -> Path:
    """Return `path`. Raise `InvalidRequestError` if the server may not read weights from this directory."""
    try:
        return data_folder(Path(path), service.weights_dir)
    except (OSError, ValueError) as error:
        hint = "start the server with the folder of the weights as `weights_dir`"
        raise InvalidRequestError(str(error), hint=hint) from None


def _prepare(service: Service, directory: Path) -> LoadableWeights:
    spec = replace(read_served_spec(directory), eos_token_ids=service.spec.eos_token_ids)
    if spec != service.spec:
        raise UsageError(
            f"cannot load the weights in {directory}: their architecture differs from the served model's",
            code="BK-WEIGHTS-UPDATE",
        )
    checkpoint = Checkpoint(directory)
    weights = service.engine.decoder.weights
    weights.check(checkpoint)
    return weights.prepare(checkpoint)


def _parse_version(value: str | int | None, default: int, field: str) -> int:
    try:
        version = default if value is None else int(value)
    except ValueError:
        raise InvalidRequestError(f"`{field}` must be a whole number, not {value!r}") from None
    if not 0 <= version < 2**63:
        raise InvalidRequestError(f"`{field}` must be from 0 to 2**63 - 1, not {version}")
    return version


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "buckeye",
        "parent": None if name == service.model_name else service.model_name,
        "max_model_len": service.max_len,
    }
