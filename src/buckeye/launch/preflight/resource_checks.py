"""Check the resources of a run: directory, inference servers, ports, keys, shared memory, object store."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from buckeye.base.disk import free_bytes, human_bytes, is_disk_full, total_bytes
from buckeye.base.keys import key
from buckeye.base.request_gate import is_loopback
from buckeye.config.rl import RLConfig
from buckeye.errors import BuckeyeError, UsageError
from buckeye.launch.mcp_gateways import mcp_tasks
from buckeye.launch.plan import fixed_ports
from buckeye.launch.preflight.check import Check, failed, failed_with, ok, skipped, warning
from buckeye.launch.preflight.ports import is_free
from buckeye.launch.run_keys import rollout_environments
from buckeye.mcp.tasks.task_schema import HttpServer
from buckeye.monitor.tracker_threads import check_trackers
from buckeye.monitor.wandb_tracker import wandb_mode
from buckeye.transport.object_store import CheckpointStore

DIRECTORY, SERVERS, PORTS = "run directory", "inference servers", "ports"
STORE, NETWORK = "checkpoint store", "network"
_DOWNLOADERS = ("uvx", "npx", "bunx", "pipx")
_SERVER_SECONDS = 5.0
_SMALL_SHM = 1_000_000_000
_SHM = Path("/dev/shm")  # noqa: S108  the mount itself is checked


def check_store(config: RLConfig) -> Check:
    """Check that the object store for checkpoints is writable: create and delete a test object."""
    ckpt = config.trainer.ckpt
    if ckpt is None or ckpt.store is None:
        return skipped(STORE, "not configured: checkpoints stay in the output directory")
    try:
        store = CheckpointStore(ckpt.store)
        store.probe()
        stored = store.list_checkpoints()
    except BuckeyeError as error:
        return failed_with(STORE, error)
    newest = f"newest checkpoint: step {stored[-1].step}" if stored else "no checkpoint yet"
    return ok(STORE, f"{store.url} is writable; {newest}")


def check_servers(config: RLConfig) -> Check:
    """Check that the inference servers that the user started respond, with any HTTP status."""
    if config.inference is not None:
        return skipped(SERVERS, "the run starts its own servers")
    urls = config.orchestrator.client.base_url
    unreachable = [url for url in urls if not _responds(url)]
    if not unreachable:
        return ok(SERVERS, ", ".join(urls))
    return failed(
        SERVERS,
        f"no response from {', '.join(unreachable)} (`orchestrator.client.base_url`)",
        "start this server first, or add `--inference` (`[inference]` in a file) so that the run starts one",
        code="BK-INFERENCE-UNREACHABLE",
    )


def _responds(url: str) -> bool:
    try:
        httpx.get(f"{url.rstrip('/')}/models", timeout=_SERVER_SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return True


def check_directory(output_dir: Path) -> Check:
    """Check that this process can write to the run directory, or can create it."""
    existing = output_dir
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".buckeye-doctor-"):
            return ok(DIRECTORY, str(output_dir))
    except OSError as error:
        is_full = is_disk_full(error)
        return failed(
            DIRECTORY,
            f"cannot write to {existing}: {error.strerror}",
            f"choose another `--output-dir`, or {'free some space' if is_full else 'change the permissions'}",
            code="BK-DISK-FULL" if is_full else "BK-FILE-PERMISSION",
        )


def check_ports(config: RLConfig) -> Check:
    """Check that the ports that the user set are free. A run chooses other ports when it starts."""
    ports = fixed_ports(config)
    if not ports:
        return ok(PORTS, "chosen when the run starts")
    taken = [port for port in ports if not is_free(port)]
    if taken:
        return failed(
            PORTS,
            f"in use by another process: {', '.join(map(str, taken))}",
            "choose another `--inference.server.port`, or remove it to use free ports",
            code="BK-PORT-TAKEN",
        )
    return ok(PORTS, f"{', '.join(map(str, ports))} free")


def check_keys(config: RLConfig, *, is_local_run: bool = True) -> Check:
    """Check that the trackers of the run have their keys.

    If the run is on this machine (`is_local_run`), also check that their libraries are installed.
    """
    settings = config.trainer.wandb
    try:
        check_trackers(config.trackers(settings), is_local_run=is_local_run)
    except UsageError as error:
        return failed_with("keys", error)
    text = "Weights & Biases has a key, or is offline" if settings is not None else "no key needed"
    return ok("keys", f"{text}{'; HF_TOKEN is set' if key('HF_TOKEN') else ''}")


def check_network(config: RLConfig) -> Check:
    """List the addresses outside this machine that a run uses, and programs that download at each start."""
    uses = [*_addresses(config), *_task_addresses(config)]
    if config.trainer.wandb is not None and wandb_mode(config.trainer.wandb) == "online":
        uses.append("Weights & Biases (writes to disk without a network; `--wandb.offline` does so at once)")
    if not uses:
        return ok(NETWORK, "not used")
    return warning(
        NETWORK, f"the run uses {'; '.join(uses)}", "make them reachable, or change these settings"
    )


def _addresses(config: RLConfig) -> Iterator[str]:
    servers = {"orchestrator.client.base_url": config.orchestrator.client.base_url}
    if config.inference is not None:
        servers.clear()
    if config.orchestrator.teacher is not None:
        servers["orchestrator.teacher.base_url"] = config.orchestrator.teacher.base_url
    for setting, urls in servers.items():
        yield from (f"{url} (`{setting}`)" for url in urls if not is_loopback(urlsplit(url).hostname or ""))
    ckpt = config.trainer.ckpt
    if ckpt is not None and ckpt.store is not None:
        yield f"{ckpt.store} (`ckpt.store`)"


def _task_addresses(config: RLConfig) -> Iterator[str]:
    """Yield the servers of MCP tasks on other machines, and programs that download other programs."""
    with suppress(BuckeyeError):  # another check reports tasks that cannot be read
        servers = [
            server for task in mcp_tasks(rollout_environments(config)) for server in task.mcp_config.values()
        ]
        urls = [server.url for server in servers if isinstance(server, HttpServer)]
        yield from dict.fromkeys(url for url in urls if not is_loopback(urlsplit(url).hostname or ""))
        programs = [server for server in servers if not isinstance(server, HttpServer)]
        yield from dict.fromkeys(
            f"`{shlex.join([server.command, *server.args])}`, which downloads a program: install it"
            for server in programs
            if Path(server.command).name in _DOWNLOADERS
        )


def check_shared_memory(*, needed: bool, path: Path = _SHM) -> Check:
    """Check the free shared memory, which vLLM and ranks on GPUs use. Containers often have only 64 MB."""
    name = "shared memory"
    if not path.is_dir():
        return skipped(name, f"{path} does not exist")
    free = free_bytes(path)
    seen = f"{human_bytes(free)} of {human_bytes(total_bytes(path))} free in {path}"
    if needed and free < _SMALL_SHM:
        return warning(name, seen, "start the container with more, such as `--shm-size 8g`")
    return ok(name, seen)
