"""Settings of a whole run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from buckeye.config.cluster import ClusterConfig
from buckeye.config.devices import INFERENCE_DEVICES, TRAINER_DEVICES
from buckeye.config.inference import InferenceConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.shared import (
    BaseConfig,
    CheckpointConfig,
    LogConfig,
    TrackedConfig,
    WandbConfig,
    conflict,
)
from buckeye.config.supervision import SupervisionConfig
from buckeye.config.trainer import TrainerConfig

DeviceIds = Annotated[list[NonNegativeInt], Field(min_length=1)]


class RunModelConfig(BaseConfig):
    """Model of all processes."""

    name: str = "Qwen/Qwen3-0.6B"
    """A model directory, or a name on the Hugging Face hub."""


class DiskConfig(BaseConfig):
    """Disk usage of a run."""

    check: bool = True
    """Refuse to start a run whose weights and checkpoints do not fit on the disk."""
    keep_logs: PositiveInt | None = None
    """Of how many earlier attempts the logs remain; None keeps all."""


class RLConfig(TrackedConfig):
    """Reinforcement learning of a policy: trainer, orchestrator and inference together.

    Settings that the processes share are set once, here or for any of them.
    """

    trainer: TrainerConfig = TrainerConfig()
    """The trainer."""
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    """The orchestrator."""
    inference: InferenceConfig | None = None
    """The inference servers; None uses those of orchestrator.client. A run that mentions neither trainer nor
    servers starts its own."""
    inference_gpu_ids: DeviceIds = INFERENCE_DEVICES
    """Devices of inference on each of its nodes: GPUs, or CPU slots where there is none."""
    trainer_gpu_ids: DeviceIds = TRAINER_DEVICES
    """Devices of the trainer on each of its nodes, one a rank."""
    output_dir: Path = Path("outputs")
    """Where everything is written."""
    clean: bool = False
    """Delete what an earlier run left in output_dir."""
    resume: bool = False
    """Go on from the newest checkpoint, as --ckpt.resume-step -1."""
    dry_run: bool = False
    """Print the resolved configuration and the plan; start nothing."""
    log: LogConfig = LogConfig()
    """What is logged, unless a process says otherwise."""
    ckpt: CheckpointConfig | None = None
    """One place to set the checkpoints of both, trainer and orchestrator."""
    wandb: WandbConfig | None = None
    """Log the run to Weights & Biases."""
    model: RunModelConfig | None = None
    """The model of all processes."""
    max_steps: PositiveInt | None = None
    """Steps of the run; None never ends."""
    max_model_len: PositiveInt | None = None
    """Longest sequence of the engines in tokens; None is the orchestrator's seq_len."""
    seq_len: PositiveInt | None = None
    """seq_len of trainer and orchestrator."""
    max_async_level: NonNegativeInt | None = None
    """How many steps sampling may run ahead of training; 0 is synchronous."""
    max_off_policy_steps: NonNegativeInt | None = None
    """How many steps old a token may be when it is trained on."""
    strict: bool = False
    """Exit with 1, not 0, if all steps are done and nothing was learnt."""
    disk: DiskConfig = DiskConfig()
    """How much disk must be free, and what happens when it is not."""
    supervision: SupervisionConfig = SupervisionConfig()
    """When a process counts as hanging, and how often what died is started again."""
    cluster: ClusterConfig = ClusterConfig()
    """The hosts of the run, if it has more than one."""

    def warnings(self) -> Iterator[tuple[str, str]]:
        if self.inference is None:
            urls = ", ".join(self.orchestrator.client.base_url)
            yield (
                "inference",
                f"none is started; the orchestrator expects servers at {urls}. Add --inference to start "
                "them.",
            )

    @property
    def stop_seconds(self) -> int:
        """Maximum duration of a trainer's end in seconds: its step, its last checkpoint, and the remaining
        uploads.
        """
        ckpt = self.trainer.ckpt
        uploads = ckpt.store_timeout if ckpt is not None and ckpt.store is not None else 0
        return self.trainer.dist_timeout_seconds + uploads

    @property
    def trainer_ranks(self) -> int:
        """Number of trainer processes, on all nodes."""
        return len(self.cluster.trainer_node_numbers) * len(self.trainer_gpu_ids)

    @model_validator(mode="after")
    def _engine_takes_adapters(self) -> RLConfig:
        lora = self.trainer.model.experimental.lora
        vllm = self.inference is not None and self.inference.backend == "vllm"
        if vllm and lora is not None and lora.modules_to_save:
            raise conflict(
                'vLLM\'s adapters are low-rank only; leave it out, or set inference.backend = "torch"',
                "trainer.model.experimental.lora.modules_to_save",
            )
        return self

    @model_validator(mode="after")
    def _rows_hold_rollouts(self) -> RLConfig:
        row, rollout = self.trainer.seq_len, self.orchestrator.seq_len
        if row < rollout:
            raise conflict(
                f"trainer.seq_len = {row} is less than orchestrator.seq_len = {rollout}: a rollout must fit "
                "into a row; set it once, with --seq-len",
                "trainer.seq_len",
                "orchestrator.seq_len",
            )
        return self

    @model_validator(mode="after")
    def _all_devices_used(self) -> RLConfig:
        if self.inference is None:
            return self
        dp, tp, count = self.inference.parallel.dp, self.inference.parallel.tp, len(self.inference_gpu_ids)
        if dp * tp != count:
            even = f"are not {dp} replicas (dp) of {tp} devices (tp)"
            uneven = f"cannot be shared out to replicas of {tp} devices (tp); give a multiple of {tp}"
            raise conflict(
                f"{count} inference devices {uneven if count % tp else even}",
                "inference_gpu_ids",
                "inference.parallel.dp",
                "inference.parallel.tp",
            )
        return self

    @model_validator(mode="after")
    def _environments_have_nodes(self) -> RLConfig:
        for index, env in enumerate(self.orchestrator.env):
            if env.placement is not None and max(env.placement) >= self.cluster.nodes:
                raise conflict(
                    f"placement = {env.placement} names a node beyond the last: cluster.nodes = "
                    f"{self.cluster.nodes} are numbered 0 to {self.cluster.nodes - 1}",
                    f"orchestrator.env.{index}.placement",
                    "cluster.nodes",
                )
        return self

    @model_validator(mode="after")
    def _nodes_share_models(self) -> RLConfig:
        """Reject a model over several nodes that shares them: Ray gives their GPUs to vLLM."""
        if self.inference is None or self.inference.parallel.pp == 1:
            return self
        pp, nodes, cluster = self.inference.parallel.pp, self.cluster.inference_node_numbers, self.cluster
        if cluster.engine == "srun" or cluster.nodes == 1:
            raise conflict(
                f"a model on pp = {pp} nodes needs a Ray cluster, which is vLLM's way over several: begin "
                f"the run with --cluster.engine ray --cluster.nodes {max(pp, cluster.nodes)}, or lower pp",
                "inference.parallel.pp",
                "cluster.engine",
            )
        if len(nodes) % pp or set(nodes) & set(cluster.trainer_node_numbers):
            raise conflict(
                f"the nodes of inference are {nodes}, and of the trainer {cluster.trainer_node_numbers}: copies of the "
                f"model on pp = {pp} nodes each need a multiple of {pp} nodes without the trainer",
                "inference.parallel.pp",
                "cluster.inference_nodes",
                "cluster.trainer_nodes",
            )
        return self

    @model_validator(mode="after")
    def _trainer_devices_divide(self) -> RLConfig:
        model, count = self.trainer.model, self.trainer_ranks
        copies = model.dp_replicate * model.tp
        if count % copies:
            raise conflict(
                f"{count} trainer devices cannot be divided into {model.dp_replicate} replicas "
                f"(dp_replicate) of {model.tp} tensor-parallel ranks (tp); give a multiple of {copies}",
                "trainer_gpu_ids",
                *(("cluster.nodes",) if self.cluster.nodes > 1 else ()),
                "trainer.model.dp_replicate",
                "trainer.model.tp",
            )
        return self

    @model_validator(mode="after")
    def _nodes_have_work(self) -> RLConfig:
        cluster = self.cluster
        inference = cluster.inference_node_numbers if self.inference is not None else []
        placed = {node for env in self.orchestrator.env for node in env.placement or ()}
        idle = set(range(1, cluster.nodes)) - {*cluster.trainer_node_numbers, *inference, *placed}
        if idle:
            raise conflict(
                f"nothing would run on node {min(idle)}: give it to cluster.trainer_nodes, "
                "cluster.inference_nodes or an environment's placement, or lower cluster.nodes",
                "cluster.nodes",
                "cluster.trainer_nodes",
                "cluster.inference_nodes",
            )
        return self

    @model_validator(mode="after")
    def _distinct_devices(self) -> RLConfig:
        for name in ("inference_gpu_ids", "trainer_gpu_ids"):
            ids = getattr(self, name)
            if len(set(ids)) < len(ids):
                raise conflict(f"{name} = {ids} names a device twice", name)
        return self
