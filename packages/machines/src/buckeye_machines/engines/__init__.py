"""Engines that start the processes of a run on other nodes: Slurm's srun, and Ray.

What a process is told, watched for and replaced by is the core's; here is only how it gets to another node.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.launch.hosts import Nodes


def engine_of(config: RLConfig) -> str:
    """The engine that `cluster.engine` means here: `srun` or `ray`."""
    if config.cluster.engine != "auto":
        return config.cluster.engine
    return "srun" if "SLURM_JOB_ID" in os.environ and "RAY_ADDRESS" not in os.environ else "ray"


@contextmanager
def nodes(config: RLConfig) -> Iterator[Nodes]:
    """The other nodes of a run, while the block lasts. Raises UsageError where there is no such engine, or
    where what nodes need of each other's disks is not there, and RunError if it has not so many nodes within
    `cluster.join_timeout`."""
    from buckeye_machines.engines.apart import reached

    if engine_of(config) == "srun":
        if config.inference is not None and config.inference.parallel.pp > 1:
            raise UsageError(
                f"a model on inference.parallel.pp = {config.inference.parallel.pp} nodes needs a Ray "
                "cluster, and within a job of Slurm srun starts the processes: run it in a container "
                "(--container-image, --apptainer), which brings Ray, or choose a tp that fits a node"
            )
        from buckeye_machines.engines.srun import srun_nodes

        with reached(config, srun_nodes(config)) as found:
            yield found
        return
    from buckeye_machines.engines.ray_cluster import ray_nodes  # Ray takes a second

    with ray_nodes(config) as there, reached(config, there) as found:
        yield found
