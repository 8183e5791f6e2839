"""Other nodes through Ray. An actor on each node reserves the devices of the run and starts its processes.

Ray assigns processors and GPUs, reports lost nodes, and ends the actors when the run ends.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from buckeye.base.distribution import need
from buckeye.config.rl import RLConfig
from buckeye.errors import RunError, UsageError
from buckeye.launch.engines.node import Node, apply_event
from buckeye.launch.hosts import Host, OtherNodes
from buckeye.launch.plan import Role
from buckeye.launch.remote_process import RemoteProcess

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.5
_REPLY_SECONDS = 60.0
_LOG_SECONDS = 30.0
_RECONNECT_SECONDS = 20.0


@contextmanager
def ray_nodes(config: RLConfig) -> Iterator[OtherNodes]:
    """Yield the nodes of a Ray cluster, reserved for the run until the block ends.

    Raises UsageError if no cluster is found or its versions differ, and RunError if the cluster does not have
    enough nodes within `cluster.join_timeout`.
    """
    need("ray", "cluster.engine = ray")
    ray = _connect(config.cluster.ray_address, config.cluster.join_timeout)
    try:
        address = config.cluster.address or str(ray.util.get_node_ip_address())
        bundles = _bundles(config, ray)
        hosts: dict[int, RayHost] = {}
        try:
            addresses = _wait_for_nodes(config, ray, address, bundles)
            for number, (node_address, bundle) in enumerate(zip(addresses, bundles, strict=True), 1):
                hosts[number] = RayHost(ray, number, node_address, bundle, address)
            yield OtherNodes(address=address, hosts=dict(hosts))
        finally:
            for host in hosts.values():
                host.close()
    finally:
        ray.shutdown()


def _connect(setting: str, timeout: float) -> Any:
    address = os.environ.get("RAY_ADDRESS", setting) if setting == "auto" else setting
    if address not in ("auto", "local"):
        _wait_until_reachable(address, timeout)
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # for Ray's messages about its nodes
    try:
        ray.init(address, log_to_driver=False, configure_logging=False, namespace="buckeye")
    except ConnectionError as error:
        raise UsageError(
            f"no Ray cluster found: {_error_line(error)}",
            code="BK-CLUSTER",
            at=f"cluster.ray_address = {setting}",
            hint="start a cluster on this host (`ray start --head`), join one (`ray start --address "
            "HOST:PORT`), or pass its address: `--cluster.ray-address HOST:PORT`. A cluster with a token "
            "needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
        ) from None
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise
        raise UsageError(
            f"versions of this host and of the Ray cluster at {address} differ: "
            + " ".join(str(error).split()),
            code="BK-PACKAGE-VERSION",
            hint="install the same Python, Ray and Buckeye on all nodes",
        ) from None
    return ray


def _wait_until_reachable(address: str, timeout: float) -> None:
    """Wait until the cluster accepts connections. `ray.init` would retry for minutes without a message."""
    parts = urlsplit(f"//{address}")
    deadline, is_logged = time.monotonic() + timeout, False
    while True:
        try:
            if parts.hostname is None or parts.port is None:
                raise ValueError
            socket.create_connection((parts.hostname, parts.port), timeout=_CONNECT_SECONDS).close()
            return
        except ValueError:
            raise UsageError(
                f"invalid address of a Ray cluster: {address!r}",
                code="BK-CONFIG-VALUE",
                at="cluster.ray_address",
                hint="write HOST:PORT",
            ) from None
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise RunError(
                f"no connection to the Ray cluster at {address} within {timeout:.0f} s: {reason}",
                code="BK-CLUSTER",
                hint="check that the cluster is running and the port is open, or raise "
                "`cluster.join_timeout`",
            )
        if not is_logged:
            log.info("Waiting at most %.0f s for the Ray cluster at %s: %s", timeout, address, reason)
            is_logged = True
        time.sleep(_POLL_SECONDS)


def _bundles(config: RLConfig, ray: Any) -> list[dict[str, float]]:
    """Return the resources that the run reserves on each of its other nodes.

    The run reserves GPUs up to the highest device id. It reserves none on nodes where vLLM reserves the GPUs.
    It reserves one processor for all processes of a node.
    """
    ids = [*config.trainer_gpu_ids, *(config.inference_gpu_ids if config.inference is not None else [])]
    on_gpu = config.trainer.model.device != "cpu" and any(
        node["Resources"].get("GPU") for node in ray.nodes() if node["Alive"]
    )
    vllm_nodes: list[int] = []
    if config.inference is not None and config.inference.parallel.pp > 1:
        vllm_nodes = config.cluster.inference_node_numbers
    return [
        {"CPU": 1, "GPU": max(ids) + 1} if on_gpu and number not in vllm_nodes else {"CPU": 1}
        for number in range(1, config.cluster.nodes)
    ]


def _candidates(ray: Any, own: str, bundle: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Return the addresses of other nodes with enough free resources.

    Also return one line per other node, with its free resources, for messages.
    """
    from ray._private.state import available_resources_per_node

    resources = available_resources_per_node()
    suitable, lines = [], []
    for node in ray.nodes():
        address, free = node["NodeManagerAddress"], resources.get(node["NodeID"], {})
        if not node["Alive"] or address == own:
            continue
        missing = [
            f"{free.get(name, 0):g} {name} free, {count:g} needed"
            for name, count in bundle.items()
            if free.get(name, 0) < count
        ]
        lines.append(f"  {address}: {'; '.join(missing) or 'enough free'}")
        if not missing:
            suitable.append(address)
    return sorted(suitable), lines


def _wait_for_nodes(
    config: RLConfig, ray: Any, own: str, bundles: Sequence[Mapping[str, float]]
) -> list[str]:
    """Wait for enough nodes, and return their addresses. Each node has room for the largest bundle."""
    bundle = max(bundles, key=len)
    count, timeout = config.cluster.nodes - 1, config.cluster.join_timeout
    started = time.monotonic()
    logged = None
    while True:
        suitable, lines = _candidates(ray, own, bundle)
        if len(suitable) >= count:
            return suitable[:count]
        now = time.monotonic()
        needs = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        others = "\n".join(lines) or "  none"
        if now - started > timeout:
            raise RunError(
                f"cluster.nodes = {config.cluster.nodes} needs {count} more Ray nodes with {needs} each; "
                f"found {len(suitable)} within {timeout:.0f} s. Nodes other than this one ({own}):\n{others}",
                code="BK-CLUSTER",
                hint="add nodes to the cluster, lower `cluster.nodes`, or raise `cluster.join_timeout`",
            )
        if logged is None or now - logged > _LOG_SECONDS:
            log.info("Waiting for %d Ray nodes with %s each. Other nodes:\n%s", count, needs, others)
            logged = now
        time.sleep(_POLL_SECONDS)


class RayHost(Host):
    """A node of the Ray cluster. If Ray loses the node, it is absent until Ray finds it again."""

    def __init__(self, ray: Any, number: int, address: str, bundle: Mapping[str, float], head: str) -> None:
        super().__init__(head)
        self._ray, self._number, self._address = ray, number, address
        self._bundle = dict(bundle)
        self._numbers = itertools.count(1)
        self._processes: dict[int, RemoteProcess] = {}
        self._lock = threading.Lock()
        self._is_closing = False
        self._group: Any = None
        self._actor: Any = None
        self._reconnecting: threading.Thread | None = None
        self._start_actor(_REPLY_SECONDS)

    @property
    def absent(self) -> str | None:
        """Name of the node for messages if it is absent, else None.

        If the node is absent, a thread checks whether it has returned.
        """
        if self._actor is not None:
            return None
        if self._reconnecting is None or not self._reconnecting.is_alive():
            self._reconnecting = threading.Thread(target=self._reconnect, daemon=True)
            self._reconnecting.start()
        return f"node {self._number} ({self._address})"

    def start(self, role: Role, env: Mapping[str, str], stdout: Path) -> RemoteProcess:
        """Start a process on the node. If the node is absent, return a process that is lost."""
        number = next(self._numbers)
        process = RemoteProcess(stdout, lambda which, session: self._signal(number, which, session))
        if self.absent is not None:
            process.record_loss(f"lost its node: {self.absent} is absent")
            return process
        with self._lock:
            self._processes[number] = process
        try:
            self._request("start", number, list(role.argv[1:]), dict(env), os.getcwd())
        except RunError as error:
            self._signal(number, signal.SIGKILL, True)  # without a reply, the process may still have started
            process.record_loss(f"lost its node: {error.message}")
        return process

    def close(self) -> None:
        """End the actor, and release the resources that it reserved."""
        self._is_closing = True
        self._release()

    def _start_actor(self, timeout: float) -> None:
        """Start the actor on the node. Raises RunError if it is not ready within `timeout` seconds."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        pinned = {**self._bundle, f"node:{self._address}": 0.001}
        self._group = placement_group([pinned], strategy="STRICT_PACK")
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        options = {
            "num_cpus": self._bundle["CPU"],
            "num_gpus": self._bundle.get("GPU", 0),
            "scheduling_strategy": strategy,
            "max_restarts": 0,
        }
        actor = self._ray.remote(Node).options(**options).remote()
        try:
            self._ray.get(actor.choose_ports.remote(0), timeout=timeout)
        except Exception as error:
            self._ray.kill(actor)
            self._release()
            raise RunError(
                f"cannot start an actor on Ray node {self._address}: {_error_line(error)}", code="BK-CLUSTER"
            ) from None
        self._actor = actor
        threading.Thread(
            target=self._read_events, args=(actor,), name=f"node {self._number}", daemon=True
        ).start()

    def _reconnect(self) -> None:
        """Start a new actor if the lost node has returned and has enough free resources."""
        try:
            if self._address in _candidates(self._ray, self._head, self._bundle)[0]:
                self._start_actor(_RECONNECT_SECONDS)
                log.info("Node %d (%s) is back", self._number, self._address)
        except RunError as error:
            log.debug("%s", error)

    def _read_events(self, actor: Any) -> None:
        """Record the events of the actor until Ray loses it. Then record all its processes as lost."""
        try:
            while True:
                for event in self._ray.get(actor.events.remote(_POLL_SECONDS), timeout=_REPLY_SECONDS):
                    with self._lock:
                        process = self._processes.get(event[0])
                        if event[1] == "ended":
                            self._processes.pop(event[0], None)
                    if process is not None:
                        apply_event(process, event)
        except Exception as error:  # any error of Ray means that the actor is lost
            if self._is_closing:
                return
            log.warning("Node %d (%s) is lost: %s", self._number, self._address, _error_line(error))
            with self._lock:
                lost, self._processes = list(self._processes.values()), {}
            self._release()
            for process in lost:
                process.record_loss(f"lost its node {self._address} ({_error_line(error)})")

    def _release(self) -> None:
        from ray.util.placement_group import remove_placement_group

        actor, self._actor = self._actor, None
        group, self._group = self._group, None
        with suppress(Exception):  # the cluster may be gone
            if actor is not None:
                self._ray.kill(actor)
            if group is not None:
                remove_placement_group(group)

    def _signal(self, number: int, which: int, session: bool) -> None:
        actor = self._actor
        if actor is not None:
            actor.signal.remote(number, which, session)

    def _request(self, method: str, *args: Any) -> Any:
        actor = self._actor
        if actor is None:
            raise RunError(f"node {self._number} ({self._address}) is absent", code="BK-CLUSTER")
        try:
            return self._ray.get(getattr(actor, method).remote(*args), timeout=_REPLY_SECONDS)
        except Exception as error:
            raise RunError(
                f"no reply from Ray node {self._address}: {_error_line(error)}", code="BK-CLUSTER"
            ) from None


def _error_line(error: BaseException) -> str:
    """Return the line of a Ray error that names the cause. The whole text can be very long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    missing = next((line for line in lines if line.startswith("ModuleNotFoundError")), None)
    if missing is not None:
        return f"{missing.partition(': ')[2]}: install buckeye-rl[train,ray] where `ray start` runs"
    return lines[0]
