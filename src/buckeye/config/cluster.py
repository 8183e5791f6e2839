"""Settings of a run that has several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from buckeye.config.base import BaseConfig, conflict
from buckeye.config.shared import Port

NodeNumbers = Annotated[list[NonNegativeInt], Field(min_length=1)]


class ClusterConfig(BaseConfig):
    """The hosts of a run. Node 0 is the one where `rl` is started; `buckeye node` makes the others of it."""

    nodes: PositiveInt = 1
    """How many hosts the run has."""
    trainer_nodes: NodeNumbers | None = None
    """Nodes with a trainer on each of the trainer_gpu_ids; None is all of them."""
    inference_nodes: NodeNumbers | None = None
    """Nodes with inference on each of the inference_gpu_ids; None is all of them."""
    address: str | None = None
    """The address of node 0 under which the other nodes reach it, in a network that you trust."""
    port: Port = 29400
    """The port of node 0 that the other nodes connect to."""
    key_file: Path | None = None
    """The file with the key that the nodes share, made if missing; None is cluster.key in output_dir."""
    join_timeout: PositiveFloat = 600.0
    """Seconds that are waited for a node, at the start and when it was lost."""
    lost_timeout: PositiveFloat = 30.0
    """Seconds without a sign of life from a node after which all of its processes count as dead."""

    @property
    def of_trainer(self) -> list[int]:
        """The nodes of the trainer, in the order of its ranks."""
        return list(range(self.nodes)) if self.trainer_nodes is None else self.trainer_nodes

    @property
    def of_inference(self) -> list[int]:
        """The nodes of inference."""
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
