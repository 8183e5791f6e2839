"""Settings of a run on several hosts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from buckeye.config.shared import BaseConfig, Conflicts, conflict

NodeNumbers = Annotated[list[NonNegativeInt], Field(min_length=1)]


class ClusterConfig(BaseConfig):
    """Hosts of a run, which all share output_dir.

    `rl` starts on node 0; `engine` starts processes on the others.
    """

    nodes: PositiveInt = 1
    """Number of hosts."""
    trainer_nodes: NodeNumbers | None = None
    """Nodes of the trainer, each with trainer_gpu_ids. None: all nodes."""
    inference_nodes: NodeNumbers | None = None
    """Nodes of inference, each with inference_gpu_ids. None: all nodes."""
    engine: Literal["auto", "srun", "ray"] = "auto"
    """Program that starts processes on other nodes. auto: srun in a Slurm job, otherwise Ray."""
    ray_address: str = "auto"
    """Address of the Ray cluster, as HOST:PORT. auto: the cluster of this host."""
    address: str | None = None
    """Address that the other nodes use to connect to node 0. None: the engine detects the address."""
    join_timeout: PositiveFloat = 600.0
    """Seconds to wait for a node, at the start of the run and after the node is lost."""

    @property
    def trainer_node_numbers(self) -> list[int]:
        """Numbers of the trainer's nodes, in the order of its ranks."""
        return list(range(self.nodes)) if self.trainer_nodes is None else self.trainer_nodes

    @property
    def inference_node_numbers(self) -> list[int]:
        """Numbers of the nodes that run inference servers."""
        return list(range(self.nodes)) if self.inference_nodes is None else self.inference_nodes

    def conflicts(self) -> Conflicts:
        for name in ("engine", "ray_address", "address"):
            if self.nodes == 1 and (value := getattr(self, name)) not in ("auto", None):
                yield conflict(
                    f'`{name}` = "{value}" has no effect with `nodes` = 1: the run stays on this host',
                    hint=f"set `nodes` to the number of hosts, or remove `{name}`",
                )
        for name in ("trainer_nodes", "inference_nodes"):
            numbers = getattr(self, name) or []
            if any(number >= self.nodes for number in numbers):
                yield conflict(
                    f"`{name}` = {numbers} has a node that does not exist: `nodes` is {self.nodes}",
                    hint=f"use nodes 0 to {self.nodes - 1}, or raise `nodes`",
                )
            if len(set(numbers)) < len(numbers):
                hint = "name each node once"
                yield conflict(f"`{name}` = {numbers} has a duplicate node", hint=hint)
