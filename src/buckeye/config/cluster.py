"""Settings of a run on several hosts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from buckeye.config.shared import BaseConfig, conflict

NodeNumbers = Annotated[list[NonNegativeInt], Field(min_length=1)]


class ClusterConfig(BaseConfig):
    """Hosts of a run, which all see output_dir. Node 0 is where `rl` is started; an engine starts processes
    on the others.
    """

    nodes: PositiveInt = 1
    """How many hosts the run has."""
    trainer_nodes: NodeNumbers | None = None
    """Nodes with a trainer on each of the trainer_gpu_ids; None is all of them."""
    inference_nodes: NodeNumbers | None = None
    """Nodes with inference on each of the inference_gpu_ids; None is all of them."""
    engine: Literal["auto", "srun", "ray"] = "auto"
    """What starts processes on other nodes; auto is srun within a job of Slurm, and Ray elsewhere."""
    ray_address: str = "auto"
    """Where the Ray cluster is: HOST:PORT or ray://HOST:PORT; auto is the one that this host is part of."""
    address: str | None = None
    """The address of node 0 under which the others reach it; None has the engine find it."""
    join_timeout: PositiveFloat = 600.0
    """Seconds that are waited for a node, at the start and when it was lost."""

    @property
    def trainer_node_numbers(self) -> list[int]:
        """Nodes of the trainer, in rank order."""
        return list(range(self.nodes)) if self.trainer_nodes is None else self.trainer_nodes

    @property
    def inference_node_numbers(self) -> list[int]:
        """Nodes of inference."""
        return list(range(self.nodes)) if self.inference_nodes is None else self.inference_nodes

    @model_validator(mode="after")
    def _nodes_exist(self) -> ClusterConfig:
        for name in ("trainer_nodes", "inference_nodes"):
            numbers = getattr(self, name) or []
            if any(number >= self.nodes for number in numbers):
                raise conflict(
                    f"{name} = {numbers} names a node beyond the last: nodes = {self.nodes} are numbered "
                    f"0 to {self.nodes - 1}",
                    name,
                    "nodes",
                )
            if len(set(numbers)) < len(numbers):
                raise conflict(f"{name} = {numbers} names a node twice", name)
        return self
