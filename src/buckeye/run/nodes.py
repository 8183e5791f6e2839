"""The other hosts of a run: awaited before it begins, told when it is over."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from buckeye import __version__
from buckeye.cluster.address import own_addresses
from buckeye.cluster.head import Nodes
from buckeye.cluster.key import KEY_FILE, key_for_run
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.monitor.log import setup_logging
from buckeye.run.machine import Machine
from buckeye.run.plan import Site


@contextmanager
def other_nodes(config: RLConfig) -> Iterator[Nodes | None]:
    """The other nodes of a run, when all have joined; None for a run of one. Raises RunError if they do not,
    and UsageError if one does not see the output directory."""
    if config.cluster.nodes == 1:
        yield None
        return
    if config.cluster.address is None:
        there = ", ".join(own_addresses()) or "none but the loopback"
        raise UsageError(
            f"cluster.nodes = {config.cluster.nodes}, and cluster.address does not say under which address "
            f"of this host the other nodes reach it. Add --cluster.address; there are: {there}"
        )
    setup_logging(config.log.level, "rl", None)
    path = key_path(config)
    nodes = Nodes(config.cluster, key_for_run(path), config.output_dir, version=__version__)
    try:
        nodes.wait(join_command(config, path))
        yield nodes
    finally:
        nodes.close()


def key_path(config: RLConfig) -> Path:
    """Where the nodes' key is."""
    return (config.cluster.key_file or config.output_dir / KEY_FILE).absolute()


def join_command(config: RLConfig, path: Path) -> str:
    """What makes a host a node of the run."""
    head = f"{config.cluster.address}:{config.cluster.port}"
    return shlex.join(["buckeye", "node", "--head", head, "--key-file", str(path)])


def sites_of(nodes: Nodes | None, config: RLConfig) -> list[Site]:
    """What the other nodes have, in the order of their numbers."""
    return [_site(nodes, number) for number in range(1, config.cluster.nodes)] if nodes is not None else []


def _site(nodes: Nodes, number: int) -> Site:
    facts = nodes.facts(number)
    return Site(
        name=f"node {number} ({facts.name})",
        machine=Machine(cores=facts.cores, gpus=facts.gpus),
        choose_ports=partial(nodes.choose_ports, number),
        address=facts.address,
        variables=facts.variables,
    )
