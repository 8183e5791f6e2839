"""Checks of a run's surroundings: directory and file system, servers, ports, keys, shared memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import httpx

from buckeye.base.disk import free_bytes, human_bytes, total_bytes
from buckeye.base.keys import key
from buckeye.config.rl import RLConfig
from buckeye.errors import BuckeyeError, UsageError
from buckeye.launch.preflight.check import Check, failed, ok, skipped, warning
from buckeye.launch.preflight.ports import is_free
from buckeye.monitor.tracker_threads import check_trackers
from buckeye.transport.object_store import CheckpointStore

DIRECTORY, SERVERS, PORTS = "run directory", "inference servers", "ports"
STORE = "checkpoint store"
_SERVER_SECONDS = 5.0
_SMALL_SHM = 1_000_000_000
_SHM = Path("/dev/shm")  # noqa: S108  the mount itself is checked


def check_store(config: RLConfig) -> Check:
    """Check that the object store for checkpoints is writable: create and delete a test object."""
    ckpt = config.trainer.ckpt
    if ckpt is None or ckpt.store is None:
        return skipped(STORE, "checkpoints are in the output directory alone")
    try:
        store = CheckpointStore(ckpt.store)
        store.probe()
        there = store.list_checkpoints()
    except BuckeyeError as error:
        return failed(STORE, str(error), "")
    newest = f"its newest checkpoint is of step {there[-1].step}" if there else "it has no checkpoint yet"
    return ok(STORE, f"{store.url} can be written to; {newest}")


def check_servers(config: RLConfig) -> Check:
    """Check that external servers answer; any answer counts."""
    if config.inference is not None:
        return skipped(SERVERS, "the run starts its own")
    urls = config.orchestrator.client.base_url
    silent = [url for url in urls if not _answers(url)]
    if not silent:
        return ok(SERVERS, ", ".join(urls))
    return failed(
        SERVERS,
        f"{', '.join(silent)} does not answer, and the run starts no server",
        "add --inference ([inference] in a file) to start one, or start that one first "
        "(orchestrator.client.base_url is where it is)",
    )


def _answers(url: str) -> bool:
    try:
        httpx.get(f"{url.rstrip('/')}/models", timeout=_SERVER_SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return True


def check_directory(output_dir: Path) -> Check:
    """Check that the run can write its directory."""
    there = output_dir
    while not there.exists():
        there = there.parent
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".buckeye-doctor-"):
            return ok(DIRECTORY, str(output_dir))
    except OSError as error:
        return failed(
            DIRECTORY,
            f"{there} cannot be written: {error.strerror}",
            "choose another --output-dir, or its owner",
        )


def check_ports(config: RLConfig) -> Check:
    """Check that the configured ports are free; other ports are chosen when the run starts."""
    inference = config.inference
    if inference is None or "port" not in inference.server.model_fields_set:
        return ok(PORTS, "free ones are picked when the run starts")
    replicas = len(config.inference_gpu_ids) // inference.parallel.tp
    ports = [inference.server.port + i for i in range(replicas)]
    taken = [port for port in ports if not is_free(port)]
    if taken:
        return failed(
            PORTS,
            f"in use by another process: {', '.join(map(str, taken))}",
            "choose another --inference.server.port, or leave it out: free ones are found",
        )
    return ok(PORTS, f"{', '.join(map(str, ports))} free")


def check_keys(config: RLConfig, *, is_local_run: bool = True) -> Check:
    """Check that the trackers of the run have their keys, and if it is `is_local_run`, their libraries."""
    settings = config.trainer.wandb
    try:
        check_trackers(config.trackers(settings), is_local_run=is_local_run)
    except UsageError as error:
        return failed("keys", str(error), "")
    there = ["HF_TOKEN"] if key("HF_TOKEN") else []
    used = (
        "Weights & Biases can be reached with a key or offline" if settings is not None else "none is needed"
    )
    return ok("keys", f"{used}{'; HF_TOKEN is set' if there else ''}")


def check_shared_memory(*, needed: bool, path: Path = _SHM) -> Check:
    """Check the size of shared memory, which ranks on GPUs and vLLM use; containers often have only 64 MB."""
    name = "shared memory"
    if not path.is_dir():
        return skipped(name, f"there is no {path}")
    free = free_bytes(path)
    seen = f"{human_bytes(free)} of {human_bytes(total_bytes(path))} free in {path}"
    if needed and free < _SMALL_SHM:
        return warning(name, seen, "start the container with more, e.g. --shm-size 8g")
    return ok(name, seen)
