"""What it costs that nodes share no disk: weights fetched over HTTP beside a copy of the files, and the time
from a batch being written on one node until the trainer on another has read it.

    python benchmarks/nodes.py [--megabytes 1024] [--files 2] [--batch-tokens N] [--rounds 5] [--folder F]

Both nodes are this host: the network is its loopback, and both processes share its processors and its disk.
What says something of other hosts is the processor time, of who fetches and of who serves together.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from buckeye.base.process import RunIdentity
from buckeye.base.storage import sha256_file, sync_tree
from buckeye.transport.batches import Batch, Sample, read_batch, remove_batch, write_batch
from buckeye.transport.weights import publish_weights
from buckeye_machines.engines.files_client import Follower, Source, fetch

ME = RunIdentity(run_id="benchmark", attempt=1)
KEY = "benchmark"
SERVER = """
import sys, time
from pathlib import Path
from buckeye_machines.engines.files_server import Files, FileServer
server = FileServer(Files(Path(sys.argv[1])), address="127.0.0.1", key=sys.argv[2])
print(server.port, flush=True)
time.sleep(1e6)
"""


def weights(there: Path, megabytes: int, files: int) -> None:
    """Version 1 of a model of random bytes."""
    size = megabytes * 10**6 // files

    def fill(directory: Path) -> None:
        for number in range(files):
            (directory / f"model-{number}.safetensors").write_bytes(os.urandom(size))

    publish_weights(there / "weights", 1, fill, identity=ME, dtype="bfloat16")


def copied(there: Path, here: Path, *, hashed: bool) -> float:
    """Seconds of a copy that is flushed to the disk, and read and hashed if it is to be."""
    began = time.monotonic()
    shutil.copytree(there / "weights" / "step_1", here / "copy")
    sync_tree(here / "copy")
    if hashed:
        for path in (here / "copy").glob("*.safetensors"):
            sha256_file(path)
    seconds = time.monotonic() - began
    shutil.rmtree(here / "copy")
    return seconds


def fetched(source: Source, here: Path) -> float:
    """Seconds until the weights are in their place, hashed and flushed."""
    began = time.monotonic()
    fetch(source, "weights", "1", here / "weights" / "step_1")
    seconds = time.monotonic() - began
    shutil.rmtree(here / "weights")
    return seconds


def measured(way: Callable[[], float], server: psutil.Process) -> tuple[float, float]:
    """Seconds, and those of processors in this process and in that of the server."""
    began = time.process_time() + sum(server.cpu_times()[:2])
    seconds = way()
    return seconds, time.process_time() + sum(server.cpu_times()[:2]) - began


def batch(step: int, tokens: int) -> Batch:
    """Samples of 2,048 tokens."""
    length = 2048
    sample = Sample(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.ones(length, np.bool_),
        logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        advantages=np.ones(length, np.float32),
        temperature=1.0,
    )
    return Batch(step=step, samples=(sample,) * (tokens // length), orchestrator_state={})


def handed_over(there: Path, read_from: Path, step: int, tokens: int) -> float:
    """Seconds from the batch being there until it is read."""
    content = batch(step, tokens)
    write_batch(there / "batches", content, identity=ME)
    began = time.monotonic()
    while read_batch(read_from / "batches", step, identity=ME) is None:
        time.sleep(0.001)
    seconds = time.monotonic() - began
    remove_batch(read_from / "batches", step)
    return seconds


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--files", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=262_144)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        there, here = Path(folder, "there"), Path(folder, "here")
        for path in (there, here):
            path.mkdir()
        weights(there, given.megabytes, given.files)
        words = [sys.executable, "-c", SERVER, str(there), KEY]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            source = Source("127.0.0.1", int(server.stdout.readline()), KEY)
            ways = {
                "copy": lambda: copied(there, here, hashed=False),
                "copy, hashed": lambda: copied(there, here, hashed=True),
                "fetch": lambda: fetched(source, here),
            }
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for _ in range(given.rounds):
                for name, way in ways.items():
                    found[name].append(measured(way, psutil.Process(server.pid)))
            for name, pairs in found.items():
                seconds, busy = (statistics.median(each) for each in zip(*pairs, strict=True))
                rate, cost = given.megabytes / seconds, 1000 * busy / given.megabytes
                print(f"weights, {name}: {rate:,.0f} MB/s, {cost:.1f} s of a processor for a GB")
            shared = [handed_over(there, there, step, given.batch_tokens) for step in range(10)]
            follower = Follower(source, here, ("batches",))
            follower.start()
            apart = [handed_over(there, here, step, given.batch_tokens) for step in range(100, 110)]
            follower.close()
            for name, waits in (("shared disk", shared), ("over HTTP", apart)):
                shown = f"{1000 * statistics.median(waits):.0f} ms"
                print(f"batch of {given.batch_tokens:,} tokens, {name}: {shown}")
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
