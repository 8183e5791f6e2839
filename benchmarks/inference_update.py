"""Cost of new weights: the pause of running requests, and the time from publishing to use."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch
from inference_load import KEY, Endpoint, Streams, random_prompts
from safetensors.torch import load_file, save_file

from buckeye.base.process import run_identity
from buckeye.inference.client import InferenceClient
from buckeye.transport.weights import publish_weights, read_weights_manifest

UPDATE_COLUMNS = (
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


async def measure_updates(endpoint: Endpoint, model: Path, folder: Path, vocab: int) -> list[tuple[str, ...]]:
    """Return a row of UPDATE_COLUMNS for each number of streams; values are medians over updates."""
    tensors = load_file(model / "model.safetensors")
    url = f"http://127.0.0.1:{endpoint.port}"
    rows = []
    async with InferenceClient([url], api_key=KEY, timeout=60, model=endpoint.model) as client:
        await client.wait_ready(60)
        for count in _STREAMS:
            figures = [
                await _update(client, endpoint, model, folder, tensors, vocab, count) for _ in range(_UPDATES)
            ]
            medians = [statistics.median(column) * 1e3 for column in zip(*figures, strict=True)]
            rows.append((str(count), *(f"{figure:.1f}" for figure in medians)))
    return rows


async def _update(
    client: InferenceClient,
    endpoint: Endpoint,
    model: Path,
    folder: Path,
    tensors: dict[str, torch.Tensor],
    vocab: int,
    count: int,
) -> tuple[float, float, float, float, float]:
    """Return seconds between two tokens, of the extra gap, of publishing, of updating, and of both."""
    info = await client.replicas[0].call("GET", "/weight_info")
    version = int(info["weight_version"]) + 1
    async with Streams(endpoint, random_prompts(count, vocab, seed=version), _NEW_TOKENS) as streams:
        await streams.more(30)
        began = time.perf_counter()

        def fill(directory: Path) -> None:
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
            shutil.copy(model / "config.json", directory)

        path = await asyncio.to_thread(  # arrivals must be recorded meanwhile
            publish_weights, folder / "weights", version, fill, identity=run_identity(), dtype="float32"
        )
        published = time.perf_counter()
        await client.update_weights(path, version, read_weights_manifest(path).checksum)
        ended = time.perf_counter()
        await streams.more(10)
        gaps = [(a, b) for times in streams.arrivals for a, b in pairwise(times)]
    typical = statistics.median(b - a for a, b in gaps if b < began)
    longest = max(b - a for a, b in gaps if b > published and a < ended)
    return typical, max(0.0, longest - typical), published - began, ended - published, ended - began
