"""Engines that start the processes of a run on other nodes: Slurm's srun, and Ray.

They only transport a process to another node. Its variables, supervision and restarts are the launcher's
task.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from buckeye.base import storage
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.launch.hosts import Host, OtherNodes
from buckeye.version import __version__

_PROBE = ".node-probe"


def select_engine(config: RLConfig) -> str:
    """Return the engine that `cluster.engine` selects here: `srun` or `ray`."""
    if config.cluster.engine != "auto":
        return config.cluster.engine
    return "srun" if "SLURM_JOB_ID" in os.environ and "RAY_ADDRESS" not in os.environ else "ray"


@contextmanager
def other_nodes(config: RLConfig) -> Iterator[OtherNodes]:
    """Yield the other nodes of a run; none for a run on one node.

    Raises UsageError if the engine is not available, if a node has another version, or if it does not see the
    run directory. Raises RunError if there are too few nodes within `cluster.join_timeout`.
    """
    if config.cluster.nodes == 1:
        yield OtherNodes()
        return
    with _started(config) as found:
        for number, host in found.hosts.items():
            _check(number, host)
        _refuse_own_disks(found, config.output_dir.absolute())
        yield found


def _check(number: int, host: Host) -> None:
    facts, python = host.facts(), sys.version.split()[0]
    if facts.version != __version__ or _minor(facts.python) != _minor(python):
        raise UsageError(
            f"node {number} ({facts.name}) has version {facts.version} of Buckeye and {facts.python} of "
            f"Python, and this host {__version__} and {python}: install the same on all nodes."
        )


def _minor(python: str) -> list[str]:
    return python.split(".")[:2]


def _started(config: RLConfig) -> AbstractContextManager[OtherNodes]:
    if select_engine(config) == "ray":
        from buckeye.launch.engines.ray_cluster import ray_nodes  # importing Ray takes a second

        return ray_nodes(config)
    if config.inference is not None and config.inference.parallel.pp > 1:
        raise UsageError(
            f"a model on inference.parallel.pp = {config.inference.parallel.pp} nodes needs a Ray "
            "cluster, and within a job of Slurm srun starts the processes: start a Ray cluster in the job "
            "and set cluster.engine = ray, or choose a tp that fits a node"
        )
    from buckeye.launch.engines.srun import srun_nodes

    return nullcontext(srun_nodes(config))


def _refuse_own_disks(found: OtherNodes, folder: Path) -> None:
    """Raise UsageError if a node does not see a file that was just written to `folder`."""
    content, probe = secrets.token_hex(16), folder / _PROBE
    folder.mkdir(parents=True, exist_ok=True)
    storage.write_file(probe, content)
    try:
        for number, host in sorted(found.hosts.items()):
            if not host.sees(probe, content):
                raise UsageError(
                    f"node {number} ({host.facts().name}) does not see {folder} of this host: put output_dir "
                    "on a file system that all nodes share, under the same path"
                )
    finally:
        probe.unlink(missing_ok=True)
