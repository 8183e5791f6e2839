"""Cost of new weights, by files, broadcast and shared memory: pause, and time from publishing to use."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from inference_load import KEY, Endpoint, Streams, random_prompts
from safetensors.torch import load_file

from buckeye.base.process import run_identity
from buckeye.inference.client import InferenceClient
from buckeye.trainer.output.broadcast import Broadcaster
from buckeye.trainer.output.stored_weights import StoredWeights, read_stored_weights
from buckeye.transport.weights import make_manifest, publish_weights, read_weights_manifest
from buckeye.transport.weights_offer import find_offer

UPDATE_COLUMNS = (
    "transport",
    "streams in flight",
    "time between tokens, ms",
    "pause of an update, ms",
    "publish, ms",
    "update, ms",
    "end to end, ms",
)
_UPDATES = 5
_STREAMS = (1, 16)
_NEW_TOKENS = 900
_FACTS: dict[str, Any] = {"identity": run_identity(), "dtype": "float32"}
Update = Callable[[int], Awaitable[float]]


async def measure_updates(endpoint: Endpoint, model: Path, folder: Path, vocab: int) -> list[tuple[str, ...]]:
    """Return a row of UPDATE_COLUMNS for each number of streams; values are medians over updates."""
    tensors = load_file(model / "model.safetensors")
    stored = read_stored_weights(model, tensors, str, pinned=False)
    assert stored is not None
    for tensor_name, tensor in tensors.items():
        stored.tensors[tensor_name].copy_(tensor)
    url = f"http://127.0.0.1:{endpoint.port}"
    rows = []
    async with InferenceClient([url], api_key=KEY, timeout=60, model=endpoint.model) as client:
        await client.wait_ready(60)
        run = Run(client, endpoint, folder, stored, vocab)
        for count in _STREAMS:
            updates: dict[str, Update] = {
                "files": run.load_files,
                "broadcast": partial(run.offer, {}),
                "shared memory": partial(run.offer, stored.shared),
            }
            figures: dict[str, list[tuple[float, ...]]] = {name: [] for name in updates}
            for _ in range(_UPDATES):  # in turn, because the load of the machine changes
                for name, update in updates.items():
                    figures[name].append(await run.measure(update, count))
            for name, measured in figures.items():
                columns = zip(*measured, strict=True)
                medians = [f"{statistics.median(column) * 1e3:.1f}" for column in columns]
                rows.append((name, str(count), *medians))
    return rows


@dataclass(frozen=True)
class Run:
    """Trainer and orchestrator of one server, which get new weights to it."""

    client: InferenceClient
    endpoint: Endpoint
    folder: Path
    stored: StoredWeights
    vocab: int

    async def load_files(self, version: int) -> float:
        """Publish files, and let the server load them. Return the time at which they were published."""
        path = await asyncio.to_thread(  # arrivals must be recorded meanwhile
            publish_weights, self.folder / "weights", version, self.stored.write, **_FACTS, durable=False
        )
        published = time.perf_counter()
        await self.client.update_weights(path, version, read_weights_manifest(path).checksum)
        return published

    async def offer(self, shared: dict[str, str], version: int) -> float:
        """Offer the weights, and let the server receive them. Return the time at which they were offered."""
        self.stored.shared = shared
        sender = Broadcaster(self.folder, "broadcast", has_adapter=False)

        def offer() -> None:
            manifest = make_manifest(version, self.stored.digests(), **_FACTS)
            sender.offer(manifest, self.stored)

        await asyncio.to_thread(offer)
        published = time.perf_counter()
        found = find_offer(self.folder, identity=_FACTS["identity"])
        assert found is not None
        accepted = self.client.accept_offer(self.folder, found)
        path, checksum = self.folder / "weights" / f"step_{version}", found.manifest.checksum
        await self.client.update_weights(path, version, checksum, broadcast=accepted)
        await asyncio.to_thread(sender.finish)
        return published

    async def measure(self, update: Update, count: int) -> tuple[float, ...]:
        """Return seconds between two tokens, of the extra gap, of publishing, of updating, and of both."""
        info = await self.client.replicas[0].call("GET", "/weight_info")
        version = int(info["weight_version"]) + 1
        prompts = random_prompts(count, self.vocab, seed=version)
        async with Streams(self.endpoint, prompts, _NEW_TOKENS) as streams:
            await streams.more(30)
            began = time.perf_counter()
            published = await update(version)
            ended = time.perf_counter()
            await streams.more(10)
            gaps = [(a, b) for times in streams.arrivals for a, b in pairwise(times)]
        typical = statistics.median(b - a for a, b in gaps if b < began)
        longest = max(b - a for a, b in gaps if b > published and a < ended)
        return typical, max(0.0, longest - typical), published - began, ended - published, ended - began
