"""Engines that start the processes of a run on other nodes: Slurm's srun, and Ray.

An engine only starts a process and passes on its events. The launcher sets the variables of the process,
supervises it and restarts it.
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
    """Return the engine that `cluster.engine` selects on this machine: `srun` or `ray`."""
    if config.cluster.engine != "auto":
        return config.cluster.engine
    return "srun" if "SLURM_JOB_ID" in os.environ and "RAY_ADDRESS" not in os.environ else "ray"


@contextmanager
def other_nodes(config: RLConfig) -> Iterator[OtherNodes]:
    """Yield the other nodes of a run. A run on one node has none.

    Raises UsageError if the engine is not available, if a node has another version of Buckeye or Python, or
    if a node cannot read the run directory. Raises RunError if fewer nodes than `cluster.nodes` are available
    within `cluster.join_timeout`.
    """
    if config.cluster.nodes == 1:
        yield OtherNodes()
        return
    with _engine_nodes(config) as nodes:
        for number, host in nodes.hosts.items():
            _check_versions(number, host)
        _check_shared_directory(nodes, config.output_dir.absolute())
        yield nodes


def _check_versions(number: int, host: Host) -> None:
    facts, python = host.facts(), sys.version.split()[0]
    if facts.version != __version__ or _minor(facts.python) != _minor(python):
        raise UsageError(
            f"node {number} ({facts.name}) has Buckeye {facts.version} and Python {facts.python}; this host "
            f"has Buckeye {__version__} and Python {python}",
            code="BK-PACKAGE-VERSION",
            hint="install the same versions on all nodes",
        )


def _minor(python: str) -> list[str]:
    return python.split(".")[:2]


def _engine_nodes(config: RLConfig) -> AbstractContextManager[OtherNodes]:
    if select_engine(config) == "ray":
        from buckeye.launch.engines.ray_cluster import ray_nodes  # importing Ray takes a second

        return ray_nodes(config)
    if config.inference is not None and config.inference.parallel.pp > 1:
        raise UsageError(
            f"inference.parallel.pp = {config.inference.parallel.pp} needs a Ray cluster, but srun starts "
            "the processes of this Slurm job",
            code="BK-CLUSTER",
            hint="start a Ray cluster in the job and set `cluster.engine = ray`, or set pp = 1 and a tp that "
            "fits on a node",
        )
    from buckeye.launch.engines.srun import srun_nodes

    return nullcontext(srun_nodes(config))


def _check_shared_directory(nodes: OtherNodes, folder: Path) -> None:
    """Raise UsageError if a node cannot read a file that this process writes to `folder`."""
    content, probe = secrets.token_hex(16), folder / _PROBE
    folder.mkdir(parents=True, exist_ok=True)
    storage.write_file(probe, content)
    try:
        for number, host in sorted(nodes.hosts.items()):
            if not host.sees(probe, content):
                raise UsageError(
                    f"node {number} ({host.facts().name}) cannot read {folder} of this host",
                    code="BK-CLUSTER",
                    hint="set `output_dir` to a path on a file system that all nodes share",
                )
    finally:
        probe.unlink(missing_ok=True)
