"""Update of one server to new weights or a new adapter, while it samples, and checks of the result."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from buckeye.base.request_gate import is_loopback
from buckeye.errors import InferenceError
from buckeye.inference.client.canary import CanaryResult, compare_canary
from buckeye.inference.client.replica import Replica, ReplicaLostError
from buckeye.inference.client.sleep import wake_up
from buckeye.transport.weights import Canary
from buckeye.transport.weights_offer import AcceptedGroup, WeightsOffer, broadcast_seconds

log = logging.getLogger(__name__)

_ARRIVAL_SECONDS = 600.0
_ARRIVAL_POLL_SECONDS = 0.05
_VERIFIED_POLL_SECONDS = 0.005
_PREPARE_SECONDS = 60.0
"""Time of a server to join a broadcast before it, and to read the received weights after it."""

ADAPTER = "buckeye-adapter"
"""Name under which servers load the LoRA adapter of a run."""


@dataclass(kw_only=True, slots=True, eq=False)
class Broadcast:
    """Group that receives offered weights in memory. A replica with a rank in `ranks` takes part, once."""

    offer: WeightsOffer
    store: Path
    ranks: dict[Replica, int]
    group: AcceptedGroup
    has_warned: bool = False

    def info(self, rank: int) -> dict[str, Any]:
        """Return the place of a server whose first worker has `rank`, as the server expects it."""
        return {
            "store": str(self.store.absolute()),
            "rank": rank,
            **asdict(self.group),
            "seconds": broadcast_seconds(self.offer.sizes),
            "manifest": asdict(self.offer.manifest),
            "sizes": self.offer.sizes,
            "shared": self.offer.shared if self.group.loopback else {},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetWeights:
    """Weights that all servers must load. If `adapter`, `path` has a LoRA adapter for the initial model.

    With `keep_kv_cache`, running requests keep the keys and values that older weights have computed. With
    `wakes`, the servers may sleep, and the update wakes them up. With `broadcast`, the files in `path` may
    not be written yet.
    """

    path: Path
    version: int
    checksum: str
    canary: Canary | None
    adapter: bool = False
    keep_kv_cache: bool = False
    wakes: bool = False
    broadcast: Broadcast | None = None


async def load_weights(replica: Replica, target: TargetWeights) -> None:
    """Replace the weights of a server. Its running requests continue with the new weights.

    Raise `InferenceError` unless all workers of the server report the new version and checksum.
    """
    is_received = await _receive(replica, target)
    if not is_received:
        await _wait_for_arrival(replica, target)
        if replica.is_vllm:
            await _wait_for_workers(replica, target, "buckeye_verify")
    if target.wakes:
        await wake_up(replica, "weights")
    try:
        # The embedded engine replaces complete weights and their version together, between two steps. vLLM
        # replaces weights while it reads them. An adapter gets its version after it is loaded. So vLLM and
        # adapters need a pause. With clear_cache, vLLM recomputes the keys and values of running requests.
        if replica.is_vllm or target.adapter:
            clears = "false" if target.keep_kv_cache else "true"
            await replica.call("POST", f"/pause?mode=keep&clear_cache={clears}")
        if target.adapter:
            await _load_adapter(replica, target)
        else:
            await _load_weights(replica, target, is_received=is_received)
    except BaseException:
        if not target.wakes:  # an engine without a KV cache must not resume
            with contextlib.suppress(InferenceError):  # the caller needs the first error
                await replica.call("POST", "/resume")
        raise
    if target.wakes:
        await wake_up(replica, "kv_cache")
    # Resume, even if this function did not pause: another client may have ended during an update. Check
    # first, because /resume waits for the engine, whose first step with new weights is long.
    state = await replica.call("GET", "/is_paused")
    if replica.parse_reply("/is_paused", lambda: state["is_paused"]):
        await replica.call("POST", "/resume")
    info = await replica.call("GET", "/weight_info")
    # the embedded server has no workers, so its own reply has the checksum
    workers = [info] if "checksum" in info else await replica.workers()
    echoed = {worker.get("checksum") for worker in workers}
    if (str(info.get("weight_version")), echoed) != (str(target.version), {target.checksum}):
        checksums = ", ".join(str(checksum)[:12] for checksum in echoed)
        raise InferenceError(
            f"the server was updated to weights version {target.version} (checksum {target.checksum[:12]}) "
            f"but reports version {info.get('weight_version')} (checksum {checksums})",
            code="BK-WEIGHTS-UPDATE",
            at=replica.url,
        )
    replica.version = target.version
    replica.adapter = ADAPTER if target.adapter else None
    dtypes = {str(worker.get("dtype")) for worker in workers}
    replica.dtype = dtypes.pop() if len(dtypes) == 1 else None


async def _receive(replica: Replica, target: TargetWeights) -> bool:
    """Let a server receive the target weights in memory. Return True if it has them and verified them.

    If this fails, a warning is logged, and the server loads the files.
    """
    broadcast = target.broadcast
    rank = None if broadcast is None else broadcast.ranks.pop(replica, None)
    if broadcast is None or rank is None:
        return False
    info = broadcast.info(rank)
    path = str(target.path.absolute())
    try:
        if replica.is_vllm:
            await _call_workers(replica, "buckeye_receive", path, info)
            await _wait_for_workers(replica, target, "buckeye_received")
        else:
            body = {"update_info": {"path": path, "broadcast": info}}
            await replica.call("POST", "/start_weight_update")
            await replica.call("POST", "/update_weights", body, timeout=info["seconds"] + _PREPARE_SECONDS)
    except ReplicaLostError:
        raise
    except InferenceError as error:
        if not broadcast.has_warned:
            broadcast.has_warned = True
            log.warning(
                "Loading weights %d from files, because their broadcast failed: %s", target.version, error
            )
        return False
    return True


async def _wait_for_arrival(replica: Replica, target: TargetWeights) -> None:
    """Wait until the weights are on the disk of the server's host.

    The trainer has written files that are not broadcast, so only another host must be asked for them.
    """
    is_here = is_loopback(urlsplit(replica.url).hostname or "")
    if is_here and target.broadcast is None:
        return
    deadline = time.monotonic() + _ARRIVAL_SECONDS
    path = str(target.path.absolute())
    while any(worker.get("published") != target.checksum for worker in await replica.workers(path)):
        if time.monotonic() > deadline:
            raise InferenceError(
                f"weights version {target.version} did not arrive on the server's host within "
                f"{_ARRIVAL_SECONDS:.0f} s",
                code="BK-WEIGHTS-TIMEOUT",
                at=replica.url,
                hint=f"check the free space in {target.path.parent} on that host",
            )
        await asyncio.sleep(_ARRIVAL_POLL_SECONDS)


async def _wait_for_workers(replica: Replica, target: TargetWeights, method: str) -> None:
    """Wait until vLLM's workers have verified the target, in files or in memory, while they sample.

    `method` returns None for a worker that is not done, then "" or the reason why it cannot load the weights.
    """
    path = str(target.path.absolute())
    deadline, pause = time.monotonic() + _ARRIVAL_SECONDS, _VERIFIED_POLL_SECONDS
    while None in (problems := await _call_workers(replica, method, path)):
        if time.monotonic() > deadline:
            raise InferenceError(
                f"weights version {target.version} were not verified within {_ARRIVAL_SECONDS:.0f} s",
                code="BK-WEIGHTS-TIMEOUT",
                at=replica.url,
                hint=f"check how fast that host reads {target.path}",
            )
        await asyncio.sleep(pause)
        pause = min(2 * pause, 1.0)
    for problem in filter(None, problems):
        message = f"the server cannot load the weights {target.checksum[:12]}: {problem}"
        raise InferenceError(message, code="BK-WEIGHTS-UPDATE", at=replica.url)


async def _call_workers(replica: Replica, method: str, *args: Any) -> list[str | None]:
    reply = await replica.call("POST", "/collective_rpc", {"method": method, "args": args})
    return replica.parse_reply("/collective_rpc", lambda: list(reply["results"]))


async def run_canary(
    replica: Replica, target: TargetWeights, canary: Canary, previous: CanaryResult | None
) -> CanaryResult | None:
    """Let a server continue the canary's prompt greedily, and compare the result with the canary.

    Return None if the weights changed during the reply, because the canary is for one version only.
    """
    sampling = {"temperature": 0.0, "max_tokens": len(canary.token_ids), "ignore_eos": True}
    generation = await replica.generate_fields(canary.prompt_ids, sampling)
    if any(version != target.version for version in generation.versions):
        return None
    return compare_canary(canary, target.checksum, generation, dtype=replica.dtype, previous=previous)


async def _load_weights(replica: Replica, target: TargetWeights, *, is_received: bool) -> None:
    if replica.is_vllm:
        await replica.call("POST", "/init_weight_transfer_engine", {"init_info": {}})
    if replica.is_vllm and any(worker.get("updating") for worker in await replica.workers()):
        # a client ended during an update, and vLLM would crash if a second update started now
        await _finish_unchanged(replica)
    if replica.is_vllm or not is_received:
        path = str(target.path.absolute())
        await replica.call("POST", "/start_weight_update")
        await replica.call("POST", "/update_weights", {"update_info": {"path": path}})
    await _check_incoming(replica, target)
    body: dict[str, Any] = {"weight_version": str(target.version)}
    if not replica.is_vllm:
        body["keep_kv_cache"] = target.keep_kv_cache
    await replica.call("POST", "/finish_weight_update", body)


async def _load_adapter(replica: Replica, target: TargetWeights) -> None:
    path = str(target.path.absolute())
    if replica.is_vllm:
        await _load_adapter_into_vllm(replica, path)
    else:
        body = {"lora_name": ADAPTER, "lora_path": path, "load_inplace": True}
        body["keep_kv_cache"] = target.keep_kv_cache
        await replica.call("POST", "/v1/load_lora_adapter", body)
    await replica.call("POST", "/update_weight_version", {"new_version": str(target.version)})


async def _load_adapter_into_vllm(replica: Replica, path: str) -> None:
    """Load an adapter into vLLM.

    The first adapter needs vLLM's own route, which registers the name. Buckeye's worker method replaces later
    adapters. vLLM's route with `load_inplace` would reload the adapter from disk at every step of a request.
    """
    await _load_in_workers(replica, path)  # if the name is not registered, this only checks the files
    listed = await replica.call("GET", "/v1/models")
    if ADAPTER not in replica.parse_reply("/v1/models", lambda: [model["id"] for model in listed["data"]]):
        await replica.request("POST", "/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": path})
        await _load_in_workers(replica, path)


async def _load_in_workers(replica: Replica, path: str) -> None:
    problems = [problem for problem in await _call_workers(replica, "buckeye_load_adapter", path) if problem]
    if problems:
        message = f"the server did not load the adapter {path}: {problems[0]}"
        raise InferenceError(message, code="BK-WEIGHTS-UPDATE", at=replica.url)


async def _check_incoming(replica: Replica, target: TargetWeights) -> None:
    """Raise `InferenceError` unless every worker has read the target weights."""
    workers = await replica.workers()
    if replica.is_vllm and not any(worker.get("incoming") for worker in workers):
        # No worker has replaced its weights. Finish the update with the old version, because vLLM accepts no
        # other update before.
        await _finish_unchanged(replica)
    for worker in workers:
        if worker.get("incoming") != target.checksum:
            reason = worker.get("problem") or f"it has {str(worker.get('incoming'))[:12]}"
            message = f"the server did not load the weights {target.checksum[:12]}: {reason}"
            raise InferenceError(message, code="BK-WEIGHTS-UPDATE", at=replica.url)


async def _finish_unchanged(replica: Replica) -> None:
    info = await replica.call("GET", "/weight_info")
    await replica.call("POST", "/finish_weight_update", {"weight_version": str(info["weight_version"])})
