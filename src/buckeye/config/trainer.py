"""Settings of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Tag, model_validator

from buckeye.config.losses import LossConfig, MaskedRatioLossConfig
from buckeye.config.shared import (
    BaseConfig,
    CheckpointConfig,
    LogConfig,
    WandbConfig,
    conflict,
    variant,
)

Fraction = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16"]


class CompileConfig(BaseConfig):
    """`torch.compile` of the model."""

    fullgraph: bool = False
    """Refuse graph breaks."""


class ActivationCheckpointConfig(BaseConfig):
    """Recompute activations in the backward pass instead of keeping them."""

    freq: PositiveInt = 1
    """Every how many layers."""


class ActivationOffloadConfig(BaseConfig):
    """Keep the inputs of recomputed layers in main memory, on a GPU; implies `ac`."""


class LoRAConfig(BaseConfig):
    """Train low-rank adapters instead of all weights; they need about ten times the learning rate."""

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: NonNegativeFloat = 16.0
    """What they add is scaled by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout before them, in training only."""
    target_modules: list[str] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    """Which modules get one: names, or the ends of names."""
    modules_to_save: list[str] = []
    """Which modules are trained in full, and are part of the adapter."""


class ExperimentalConfig(BaseConfig):
    """Experimental settings, which may change."""

    lora: LoRAConfig | None = None
    """Low-rank adapters; None trains all weights."""


class ModelConfig(BaseConfig):
    """Model to train, and how it is run."""

    name: str = "Qwen/Qwen3-0.6B"
    """A model directory, or a name on the Hugging Face hub; or the folder of an adapter, which sets `adapter`
    and names its base."""
    adapter: Path | None = None
    """The folder of an adapter to start from: with experimental.lora it is trained further, without it is
    merged into the model, which is trained whole."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it is trained; auto takes a GPU if there is one."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the layers compute in; the weights stay float32. auto is bfloat16 on a GPU, and float32 on a CPU
    up to 5 million parameters (above that bfloat16 where the processor has instructions for it)."""
    attn: Literal["flash_attention_2", "sdpa"] = "flash_attention_2"
    """The attention kernel on a GPU; a CPU uses sdpa."""
    compile: CompileConfig | None = None
    """Compile the model."""
    ac: ActivationCheckpointConfig | None = None
    """Trade time for memory: recompute activations."""
    ac_offloading: ActivationOffloadConfig | None = None
    """Trade time for memory: recompute activations, and move what remains of them to main memory."""
    sharding: Literal["auto", "full", "none"] = "auto"
    """Whether ranks divide the model among them (full) or each hold all of it (none); auto divides it on
    several GPUs, and wherever dp_replicate or tp is set."""
    fsdp_cpu_offload: bool = False
    """Keep the shards, their gradients and the optimizer in main memory; on GPUs only."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass, and gather them again for the backward
    pass."""
    dp_replicate: PositiveInt = 1
    """Replicas of the sharded model: each is divided among 1/dp_replicate of the ranks."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks: so many divide the heads and inner units of every layer."""
    load_using_meta: bool = False
    """Of a sharded model every rank reads its own shards only, not the whole model first."""
    reduce_dtype: Dtype = "float32"
    """Type in which gradients are summed over ranks, a step's or, of a sharded model, a row's."""
    experimental: ExperimentalConfig = ExperimentalConfig()
    """What may change."""

    @model_validator(mode="after")
    def _shards_are_wanted(self) -> ModelConfig:
        if self.sharding == "none" and (self.dp_replicate > 1 or self.fsdp_cpu_offload):
            asks = "dp_replicate" if self.dp_replicate > 1 else "fsdp_cpu_offload"
            raise conflict(f'sharding = "none" and {asks} asks for shards', "sharding", asks)
        if self.experimental.lora is not None and self.tp > 1:
            raise conflict("adapters are not divided by tensor parallelism; leave tp at 1", "tp")
        if self.load_using_meta and (self.experimental.lora is not None or self.adapter is not None):
            raise conflict(
                "adapters are put on a model that is loaded whole: leave load_using_meta out",
                "load_using_meta",
                "adapter" if self.experimental.lora is None else "experimental.lora",
            )
        return self


class BaseOptimizerConfig(BaseConfig):
    """Settings of every optimizer."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decay of matrices."""
    max_norm: PositiveFloat | None = 1.0
    """Gradients longer than this are cut to it; None does not."""


class AdamWConfig(BaseOptimizerConfig):
    """AdamW."""

    type: Literal["adamw"] = "adamw"
    """The optimizer."""
    betas1: Fraction = 0.9
    """Decay of the mean of gradients."""
    betas2: Fraction = 0.999
    """Decay of the mean of their squares."""


class AdamW8bitConfig(BaseOptimizerConfig):
    """AdamW with 8 bits per element of its two moments (a quarter of AdamW's memory)."""

    type: Literal["adamw8bit"] = "adamw8bit"
    """The optimizer; needs the extra `optim8bit` and a model that is not sharded."""
    betas1: Fraction = 0.9
    """Decay of the mean of gradients."""
    betas2: Fraction = 0.999
    """Decay of the mean of their squares."""


class MuonConfig(BaseOptimizerConfig):
    """Muon for the hidden matrices, AdamW for the rest."""

    type: Literal["muon"] = "muon"
    """The optimizer."""
    momentum: Fraction = 0.95
    """Muon's momentum, of the hidden matrices."""
    nesterov: bool = True
    """Nesterov's form of it."""
    betas1: Fraction = 0.9
    """AdamW's decay of the mean of gradients."""
    betas2: Fraction = 0.999
    """AdamW's decay of the mean of their squares."""


class SGDConfig(BaseOptimizerConfig):
    """Stochastic gradient descent."""

    type: Literal["sgd"] = "sgd"
    """The optimizer."""
    nesterov: bool = True
    """Nesterov's momentum."""
    momentum: Fraction = 0.9
    """Momentum."""


OptimizerConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")]
    | Annotated[AdamW8bitConfig, Tag("adamw8bit")]
    | Annotated[SGDConfig, Tag("sgd")]
    | Annotated[MuonConfig, Tag("muon")],
    variant("adamw"),
]


def check_optimizer(optim: OptimizerConfig, model: ModelConfig) -> None:
    """Raise a conflict if the optimizer cannot update a model that is sharded among ranks."""
    divided = model.sharding == "full" or model.dp_replicate > 1 or model.tp > 1
    if optim.type == "adamw8bit" and divided:
        raise conflict(
            "cannot update a model that is divided among ranks; use adamw, whose moments are divided too",
            "optim.type",
        )


class ConstantSchedulerConfig(BaseConfig):
    """Constant learning rate."""

    type: Literal["constant"] = "constant"
    """The shape of the learning rate."""


class LinearSchedulerConfig(BaseConfig):
    """Learning rate that rises, stays, and falls, all linearly."""

    type: Literal["linear"] = "linear"
    """The shape of the learning rate."""
    warmup: NonNegativeInt = 10
    """Steps of the rise."""
    decay: NonNegativeInt = 10
    """Steps of the fall, at the end; needs max_steps."""
    min_lr: NonNegativeFloat = 0.0
    """Where it ends."""


class CosineSchedulerConfig(BaseConfig):
    """Learning rate that rises linearly, then falls along half a cosine; needs max_steps."""

    type: Literal["cosine"] = "cosine"
    """The shape of the learning rate."""
    warmup: NonNegativeInt = 10
    """Steps of the rise."""
    min_lr: NonNegativeFloat = 0.0
    """Where it ends."""


SchedulerConfig = Annotated[
    Annotated[ConstantSchedulerConfig, Tag("constant")]
    | Annotated[LinearSchedulerConfig, Tag("linear")]
    | Annotated[CosineSchedulerConfig, Tag("cosine")],
    variant("constant"),
]


class WeightsConfig(BaseConfig):
    """Format of weights for inference."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What they are stored as, however they are trained; auto is what the trainer computes in. An engine that
    computes in less (`inference.model.dtype`) rounds them again. An adapter is always float32."""
    rounding: Literal["auto", "nearest", "stochastic"] = "auto"
    """How float32 weights are rounded. To nearest, a change of less than half of a last place is lost;
    stochastic stores bfloat16 and keeps such changes in the mean of many weights. auto is stochastic on a CPU
    where bfloat16 is stored, and to nearest on a GPU."""
    measure_interval: PositiveInt | None = 20
    """Steps between two measurements of how much of what was trained is in them; steps 1, 2, 4, ... before
    the first too. None never measures."""

    @model_validator(mode="after")
    def _stochastic_is_bfloat16(self) -> WeightsConfig:
        if self.rounding == "stochastic" and self.dtype not in ("auto", "bfloat16"):
            raise conflict(
                f'rounding = "stochastic" is to bfloat16, and dtype is {self.dtype}: leave one of them out',
                "rounding",
                "dtype",
            )
        return self


class TrainerCheckpointConfig(CheckpointConfig):
    """Checkpoints of the trainer."""

    skip_dataloader: bool = False
    """On resuming, start the data from its beginning."""


class TrainedBatchesConfig(BaseConfig):
    """Batches kept in `trained/` after training, with the trainer's log-probs."""

    keep: NonNegativeInt | None = None
    """How many of the newest; 0 keeps none, None is no limit but that of bytes."""
    max_bytes: PositiveInt = 2**29
    """How much disk they may take; the oldest go first."""
    record_order: bool = False
    """Keep all, whole and in order, whatever max_bytes says, so that `rl replay --all` can repeat the run."""

    @model_validator(mode="after")
    def _all_is_no_number(self) -> TrainedBatchesConfig:
        if self.record_order and self.keep is not None:
            raise conflict("record_order keeps every batch: leave keep out", "record_order", "keep")
        return self


class TrainerConfig(BaseConfig):
    """Training of the policy on the orchestrator's batches."""

    model: ModelConfig = ModelConfig()
    """The model to train and how it is run."""
    optim: OptimizerConfig = AdamWConfig()
    """The optimizer."""
    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """The shape of the learning rate."""
    loss: LossConfig = MaskedRatioLossConfig()
    """The policy-gradient loss."""
    ckpt: TrainerCheckpointConfig | None = TrainerCheckpointConfig()
    """Checkpoints at an interval; None writes one at the end only."""
    weights: WeightsConfig = WeightsConfig()
    """How weights are saved for inference."""
    trained: TrainedBatchesConfig = TrainedBatchesConfig()
    """What stays of the batches that were trained on, so that `rl replay` can compute a step again."""
    log: LogConfig = LogConfig()
    """What is logged."""
    wandb: WandbConfig | None = None
    """Log to Weights & Biases."""
    output_dir: Path = Path("outputs")
    """Where everything is written."""
    max_steps: PositiveInt | None = None
    """Optimizer steps; None never ends."""
    max_async_level: NonNegativeInt = 1
    """How many steps sampling may run ahead of training; 0 is synchronous."""
    max_off_policy_steps: NonNegativeInt = 8
    """How many steps old a token may be when it is trained on; older samples are left out."""
    seq_len: PositiveInt = 2048
    """Tokens that are computed at once: samples are packed into rows of this length."""
    seed: int = 0
    """Seed of the trainer's own randomness."""
    batch_timeout: PositiveFloat = 3600.0
    """Seconds to wait for a batch before giving up."""
    dist_timeout_seconds: PositiveInt = 600
    """Seconds that ranks wait for each other."""

    @model_validator(mode="after")
    def _an_adapter_is_not_rounded(self) -> TrainerConfig:
        weights = self.weights
        if self.model.experimental.lora is not None and (
            weights.dtype not in ("auto", "float32") or weights.rounding == "stochastic"
        ):
            raise conflict(
                "an adapter is published in float32, and kept apart from rounded weights: leave "
                "weights.dtype and weights.rounding out",
                "weights",
                "model.experimental.lora",
            )
        return self

    @model_validator(mode="after")
    def _optimizer_fits(self) -> TrainerConfig:
        check_optimizer(self.optim, self.model)
        return self
