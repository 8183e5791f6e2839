"""Measure how fast checkpoints go to an object store and come from it.

moto_server -p 5000 &                # of moto[server]: an in-memory S3 server on this machine
export AWS_ENDPOINT_URL=http://127.0.0.1:5000 AWS_ACCESS_KEY_ID=a AWS_SECRET_ACCESS_KEY=b
curl -X PUT http://127.0.0.1:5000/bucket
python benchmarks/store.py s3://bucket/x [--megabytes 500] [--files 4] [--rounds 3] [--folder F]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from buckeye.base.process import RunIdentity
from buckeye.transport.checkpoint import list_checkpoints, read_commit, save_checkpoint
from buckeye.transport.object_store import CheckpointStore, name_in_store

ME = RunIdentity(run_id="aaaa1111", attempt=1)


def made(run: Path, megabytes: int, files: int) -> None:
    """Make the directory of a run with a checkpoint of random bytes."""
    run.mkdir()
    begun = {"attempt": 1, "started": 1.5, "resumed_step": None}
    (run / "run.json").write_text(json.dumps({"run_id": ME.run_id, "attempt": 1, "attempts": [begun]}))

    def fill(folder: Path) -> dict[str, object]:
        for number in range(files):
            (folder / f"part-{number}.safetensors").write_bytes(os.urandom(megabytes * 10**6 // files))
        return {}

    save_checkpoint(run / "checkpoints", 1, fill, orchestrator_state={}, identity=ME)


def fetch(store: CheckpointStore, here: Path) -> None:
    store.download(store.list_checkpoints()[0], here)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall seconds of `work`, and its processor seconds in this process."""
    began, own = time.monotonic(), time.process_time()
    work()
    return time.monotonic() - began, time.process_time() - own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"sent": [], "fetched": []}
    used: dict[str, list[float]] = {"sent": [], "fetched": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        made(root / "run", options.megabytes, options.files)
        (info,) = list_checkpoints(root / "run" / "checkpoints")
        commit = read_commit(info.path)
        for number in range(options.rounds):
            store = CheckpointStore(f"{options.url}/{os.getpid()}-{number}")
            here, name = root / f"here_{number}", name_in_store(info, commit)
            here.mkdir()
            send = partial(store.upload, info.path, commit, name, root / "run")
            for what, work in (("sent", send), ("fetched", partial(fetch, store, here))):
                seconds, own = timed(work)
                rates[what].append(options.megabytes / seconds)
                used[what].append(1000 * own / options.megabytes)
    for what, found in rates.items():
        print(
            f"{what}: {statistics.median(found):.0f} MB/s ({min(found):.0f} to {max(found):.0f}), "
            f"{statistics.median(used[what]):.1f} s of a processor for a GB"
        )


if __name__ == "__main__":
    main()
