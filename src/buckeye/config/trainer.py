"""Settings of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Tag

from buckeye.config.losses import LossConfig, MaskedRatioLossConfig, ReinforceLossConfig
from buckeye.config.shared import (
    BaseConfig,
    CheckpointConfig,
    Conflicts,
    LogConfig,
    ModelName,
    Quantization,
    UserPath,
    WandbConfig,
    conflict,
    variant,
)

Fraction = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16"]


class CompileConfig(BaseConfig):
    """`torch.compile` of the model."""


class ActivationCheckpointConfig(BaseConfig):
    """Recomputation of activations in the backward pass, to save memory."""

    freq: PositiveInt = 1
    """Recompute every n-th layer."""


class ActivationOffloadConfig(BaseConfig):
    """Storage of the inputs of recomputed layers in main memory (GPU only). Implies `ac`."""


class LoRAConfig(BaseConfig):
    """Training of low-rank adapters instead of all weights. It needs about ten times the learning rate."""

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: NonNegativeFloat = 16.0
    """Scale: the output of an adapter is multiplied by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout before the adapters, in training only."""
    target_modules: list[str] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    """Modules with an adapter: names, or suffixes of names."""
    modules_to_save: list[str] = []
    """Modules to train in full and save with the adapter."""
    use_rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead of alpha / rank (rsLoRA)."""
    layers_to_transform: list[NonNegativeInt] | None = None
    """Numbers of the layers with an adapter. None: all layers."""


class ExperimentalConfig(BaseConfig):
    """Experimental settings, which may change."""

    lora: LoRAConfig | None = None
    """Low-rank adapters. None: train all weights."""


class ModelConfig(BaseConfig):
    """Model to train."""

    name: ModelName = "Qwen/Qwen3-0.6B"
    """A model directory, a name on the Hugging Face hub, or an adapter folder. With an adapter folder,
    training starts from the adapter and its base model."""
    adapter: UserPath | None = None
    """Folder of an adapter to start from. With experimental.lora, the adapter is trained. Without it, the
    adapter is merged into the model, and the model is trained."""
    quantization: Quantization | None = None
    """Load the linear layers of the frozen base in 4 bits (NF4) or 8 bits (int8), for experimental.lora
    (QLoRA). Requires the extra `optim8bit`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto: a GPU if available."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the computation; weights stay float32. auto: bfloat16 on a GPU; on a CPU float32 up to 5
    million parameters, above that bfloat16 if the processor has instructions for it."""
    attn: Literal["flash_attention_2", "sdpa"] = "flash_attention_2"
    """Attention kernel on a GPU. A CPU uses sdpa."""
    compile: CompileConfig | None = None
    """Compile the model with `torch.compile`."""
    ac: ActivationCheckpointConfig | None = None
    """Save memory: recompute activations."""
    ac_offloading: ActivationOffloadConfig | None = None
    """Save more memory: recompute activations, and keep their inputs in main memory."""
    sharding: Literal["auto", "full", "none"] = "auto"
    """full: divide the model among ranks. none: one complete model per rank. auto: full on several GPUs, or
    if dp_replicate or tp is set."""
    fsdp_cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in main memory (GPU only)."""
    reshard_after_forward: bool = True
    """Free the gathered parameters of a layer after its forward pass, and gather them for the backward
    pass."""
    dp_replicate: PositiveInt = 1
    """Number of replicas of the sharded model. Each has 1/dp_replicate of the ranks."""
    tp: PositiveInt = 1
    """Number of ranks that share the heads and hidden units of each layer (tensor parallelism)."""
    load_using_meta: bool | None = None
    """Load tensor by tensor, and on a rank of a sharded model only its shards. false: load the whole model
    first. None: if the model's files allow it."""
    reduce_dtype: Dtype = "float32"
    """Data type for the sum of gradients over ranks."""
    experimental: ExperimentalConfig = ExperimentalConfig()
    """Experimental settings, which may change."""

    def conflicts(self) -> Conflicts:
        if self.sharding == "none" and (self.dp_replicate > 1 or self.fsdp_cpu_offload):
            name = "dp_replicate" if self.dp_replicate > 1 else "fsdp_cpu_offload"
            message = f'`{name}` requires shards, and `sharding` = "none" makes none'
            yield conflict(message, hint="leave one of the two out")
        if self.experimental.lora is not None and self.tp > 1:
            message = f"`tp` = {self.tp} cannot divide the adapters of `experimental.lora`"
            yield conflict(message, hint="set `tp` to 1")
        if self.quantization is not None and self.experimental.lora is None:
            message = "only an adapter can be trained on the rounded weights of `quantization`"
            yield conflict(message, hint="set `experimental.lora`, or leave `quantization` out")
        if self.quantization is not None and (
            self.sharding == "full" or self.tp > 1 or self.dp_replicate > 1
        ):
            yield conflict(
                "the rounded weights of `quantization` cannot be divided among ranks",
                hint='set `sharding` to "none"',
            )
        if self.load_using_meta and self.adapter is not None and self.experimental.lora is None:
            yield conflict(
                "`adapter` is merged into a complete model, and `load_using_meta` loads shards",
                hint="leave `load_using_meta` out",
            )


class BaseOptimizerConfig(BaseConfig):
    """Settings of every optimizer."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of matrices."""
    max_norm: PositiveFloat | None = 1.0
    """Maximum norm of the gradients. Larger gradients are scaled to this norm. None: no clipping."""


class AdamWConfig(BaseOptimizerConfig):
    """AdamW."""

    type: Literal["adamw"] = "adamw"
    """Optimizer."""
    betas1: Fraction = 0.9
    """Decay of the first moment."""
    betas2: Fraction = 0.999
    """Decay of the second moment."""


class AdamW8bitConfig(BaseOptimizerConfig):
    """AdamW with 8 bits per element of its moments (a quarter of AdamW's memory)."""

    type: Literal["adamw8bit"] = "adamw8bit"
    """Optimizer. adamw8bit requires the extra `optim8bit` and a model without shards."""
    betas1: Fraction = 0.9
    """Decay of the first moment."""
    betas2: Fraction = 0.999
    """Decay of the second moment."""


class MuonConfig(BaseOptimizerConfig):
    """Muon for the hidden matrices, AdamW for the rest."""

    type: Literal["muon"] = "muon"
    """Optimizer."""
    momentum: Fraction = 0.95
    """Momentum of Muon."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    betas1: Fraction = 0.9
    """Decay of AdamW's first moment."""
    betas2: Fraction = 0.999
    """Decay of AdamW's second moment."""


class SGDConfig(BaseOptimizerConfig):
    """Stochastic gradient descent."""

    type: Literal["sgd"] = "sgd"
    """Optimizer."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    momentum: Fraction = 0.9
    """Momentum."""


OptimizerConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")]
    | Annotated[AdamW8bitConfig, Tag("adamw8bit")]
    | Annotated[SGDConfig, Tag("sgd")]
    | Annotated[MuonConfig, Tag("muon")],
    variant("adamw"),
]


class ConstantSchedulerConfig(BaseConfig):
    """Constant learning rate."""

    type: Literal["constant"] = "constant"
    """Schedule of the learning rate."""


class LinearSchedulerConfig(BaseConfig):
    """Learning rate with linear warmup and linear decay."""

    type: Literal["linear"] = "linear"
    """Schedule of the learning rate."""
    warmup: NonNegativeInt = 10
    """Number of warmup steps."""
    decay: NonNegativeInt = 10
    """Number of decay steps at the end. 0 without max_steps."""
    min_lr: NonNegativeFloat = 0.0
    """Final learning rate."""


class CosineSchedulerConfig(BaseConfig):
    """Learning rate with linear warmup and cosine decay; without max_steps it does not decay."""

    type: Literal["cosine"] = "cosine"
    """Schedule of the learning rate."""
    warmup: NonNegativeInt = 10
    """Number of warmup steps."""
    min_lr: NonNegativeFloat = 0.0
    """Final learning rate."""


SchedulerConfig = Annotated[
    Annotated[ConstantSchedulerConfig, Tag("constant")]
    | Annotated[LinearSchedulerConfig, Tag("linear")]
    | Annotated[CosineSchedulerConfig, Tag("cosine")],
    variant("constant"),
]


class WeightsConfig(BaseConfig):
    """Format and transport of weights for inference."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of stored weights. auto: the compute type of the trainer. An engine with a smaller type
    (`inference.model.dtype`) rounds them again. Adapters are always float32."""
    rounding: Literal["auto", "nearest", "stochastic"] = "auto"
    """Rounding of float32 weights. nearest loses changes below half a unit in the last place. stochastic
    keeps them on average, and requires bfloat16. auto: stochastic for bfloat16 on a CPU, nearest on a GPU."""
    transport: Literal["auto", "files", "broadcast"] = "auto"
    """Way of new weights to the engines: files in output_dir, or memory: shared on one machine, sent to
    others. auto: memory if writing the files takes longer. Files are always written; adapters use files."""
    measure_interval: PositiveInt | None = 20
    """Steps between two measurements of the part of the update that the stored weights contain. Before the
    first of these steps, steps 1, 2, 4, ... are also measured. None: off."""

    def conflicts(self) -> Conflicts:
        if self.rounding == "stochastic" and self.dtype not in ("auto", "bfloat16"):
            yield conflict(
                f'`rounding` = "stochastic" requires bfloat16, and `dtype` is {self.dtype}',
                hint="leave one of the two out",
            )


class TrainerCheckpointConfig(CheckpointConfig):
    """Checkpoints of the trainer."""

    skip_dataloader: bool = False
    """Restart the data from its beginning on resume."""


class TrainedBatchesConfig(BaseConfig):
    """Batches to keep in `trained/` after training, with the log-probs of the trainer."""

    keep: NonNegativeInt | None = None
    """Number of the newest batches to keep. 0: none. None: limited only by max_bytes."""
    max_bytes: PositiveInt = 2**29
    """Maximum disk usage in bytes. The oldest batches are deleted first."""
    record_order: bool = False
    """Keep all batches in order, regardless of max_bytes, so that `rl replay --all` can repeat the run."""

    def conflicts(self) -> Conflicts:
        if self.record_order and self.keep is not None:
            message = f"`record_order` keeps every batch, and `keep` is {self.keep}"
            yield conflict(message, hint="leave `keep` out")


class SupervisedConfig(BaseConfig):
    """Conversations that every update also trains on, with cross-entropy on the tokens of the assistant."""

    path: UserPath
    """File of conversations: JSON lines as of `buckeye sft`. Conversations above seq_len are dropped."""
    batch_size: PositiveInt = 8
    """Number of conversations per update."""
    coef: PositiveFloat = 0.1
    """Weight of their mean negative log-prob per trained token, which is added to the loss."""
    seed: int = 0
    """Seed of the order of conversations."""


class TrainingConfig(BaseConfig):
    """Settings of the trainer that reinforcement learning and fine-tuning share."""

    model: ModelConfig = ModelConfig()
    """Model to train."""
    optim: OptimizerConfig = AdamWConfig()
    """Optimizer."""
    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """Schedule of the learning rate."""
    ckpt: TrainerCheckpointConfig | None = TrainerCheckpointConfig()
    """Checkpoints at an interval. None: one at the end only."""
    log: LogConfig = LogConfig()
    """Logging."""
    wandb: WandbConfig | None = None
    """Log to Weights & Biases."""
    output_dir: UserPath = Path("outputs")
    """Output directory of the run."""
    seed: int = 0
    """Seed of the trainer."""
    dist_timeout_seconds: PositiveInt = 600
    """Timeout of collective operations between ranks, in seconds."""

    def conflicts(self) -> Conflicts:
        model = self.model
        is_sharded = model.sharding == "full" or model.dp_replicate > 1 or model.tp > 1
        if self.optim.type == "adamw8bit" and is_sharded:
            message = "`optim.type` = adamw8bit cannot update a sharded model"
            yield conflict(message, hint="use adamw, whose moments are sharded too")


class TrainerConfig(TrainingConfig):
    """Training of the policy on the orchestrator's batches."""

    loss: LossConfig = MaskedRatioLossConfig()
    """Policy-gradient loss."""
    supervised: SupervisedConfig | None = None
    """Conversations that every update also trains on. None: rollouts only."""
    mini_batches: PositiveInt = 1
    """Number of mini-batches of a batch. Each has whole groups, and its own optimizer update. Ratios are to
    the policy that sampled the tokens."""
    epochs_per_batch: PositiveInt = 1
    """Number of passes over each batch. The updates of a batch are one step, with one learning rate."""
    weights: WeightsConfig = WeightsConfig()
    """Format and transport of weights for inference."""
    trained: TrainedBatchesConfig = TrainedBatchesConfig()
    """Trained batches to keep, so that `rl replay` can repeat a step."""
    max_steps: PositiveInt | None = None
    """Number of steps. A step trains on one batch. None: no limit."""
    max_async_level: NonNegativeInt = 1
    """Maximum number of steps that sampling runs ahead of training. 0: synchronous."""
    max_off_policy_steps: NonNegativeInt = 8
    """Maximum age of a trained token, in steps. Older samples are dropped."""
    seq_len: PositiveInt = 2048
    """Row length in tokens. Samples are packed into rows. The trainer computes a row at once."""
    batch_timeout: PositiveFloat = 3600.0
    """Seconds to wait for a batch of the orchestrator before the trainer fails."""

    def warnings(self) -> Iterator[str]:
        if not isinstance(self.loss, ReinforceLossConfig):
            return
        updates, tokens = "the updates after the first one", "tokens of older policies"
        for name, least, what in (
            ("mini_batches", 1, updates),
            ("epochs_per_batch", 1, updates),
            ("max_async_level", 0, tokens),
        ):
            if name in self.model_fields_set and (value := getattr(self, name)) > least:
                yield (
                    f"`{name}` is {value}, and loss.type = {self.loss.type} has no ratio to correct {what}; "
                    "use cispo or ppo, for example"
                )

    def conflicts(self) -> Conflicts:
        yield from super().conflicts()
        weights = self.weights
        if self.model.experimental.lora is not None and (
            weights.dtype not in ("auto", "float32") or weights.rounding == "stochastic"
        ):
            yield conflict(
                "`weights` cannot round an adapter of `model.experimental.lora`, which is published in "
                "float32",
                hint="leave weights.dtype and weights.rounding out",
            )
