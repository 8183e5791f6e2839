"""Settings of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from buckeye.config.base import BaseConfig
from buckeye.config.shared import DEFAULT_MODEL, Device, LogConfig, PositiveInt, WandbConfig


class CompileConfig(BaseConfig):
    """torch.compile."""

    fullgraph: bool = False
    """Refuse graph breaks."""


class ActivationCheckpointConfig(BaseConfig):
    """Recompute activations in the backward pass instead of keeping them."""

    freq: PositiveInt = 1
    """Checkpoint every so many layers."""


class ActivationOffloadConfig(BaseConfig):
    """Keep activations in host memory."""

    pin_memory: bool = True
    """Use pinned memory."""
    max_inflight_activations: PositiveInt = 5
    """How many transfers may be under way."""


class ModelDebugConfig(BaseConfig):
    """For debugging the trainer."""

    num_layers: PositiveInt | None = None
    """Use only so many layers."""
    random_init: bool = False
    """Start from random weights."""


class LoRAConfig(BaseConfig):
    """Low-rank adapters."""

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: float = 16.0
    """Their scale."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on their input."""
    target_modules: list[str] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    """Modules that get an adapter."""
    modules_to_save: list[str] = []
    """Modules that are trained in full."""


class ExperimentalConfig(BaseConfig):
    """Experimental model settings."""

    lora: LoRAConfig | None = None
    """Train low-rank adapters only."""


class TrainerModelConfig(BaseConfig):
    """The model as the trainer holds it."""

    name: str = DEFAULT_MODEL
    """A local model directory or a Hugging Face id."""
    device: Device = "auto"
    """Where to train; auto takes a GPU where there is one."""
    attn: Literal["flash_attention_2", "flash_attention_3", "fa3", "sdpa"] = "flash_attention_2"
    """Attention kernel on GPUs; torch's own is used where the package is not installed."""
    compile: CompileConfig | None = None
    """Compile the model."""
    ac: ActivationCheckpointConfig | None = None
    """Activation checkpointing."""
    ac_offloading: ActivationOffloadConfig | None = None
    """Activation offloading."""
    fsdp_cpu_offload: bool = False
    """Keep parameters and optimizer in host memory."""
    reshard_after_forward: bool = True
    """Free gathered parameters between forward and backward."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    dp_replicate: PositiveInt = 1
    """Replicas of a sharded group."""
    ep: PositiveInt = 1
    """Expert parallelism."""
    tp: PositiveInt = 1
    """Tensor parallelism."""
    cp: PositiveInt = 1
    """Context parallelism."""
    impl: Literal["hf", "liger_kernel", "custom"] = "hf"
    """Implementation of the layers."""
    load_using_meta: bool = False
    """Build the model without memory before loading."""
    optimization_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights that the optimizer updates."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which gradients are summed over ranks."""
    moe_use_grouped_mm: bool = True
    """Grouped matrix products in mixtures of experts."""
    debug: ModelDebugConfig = ModelDebugConfig()
    """For debugging."""
    experimental: ExperimentalConfig = ExperimentalConfig()
    """Experimental settings."""


class _OptimizerConfig(BaseConfig):
    lr: Annotated[float, Field(ge=0.0)] = 1e-6
    """Learning rate."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    """Decoupled weight decay."""
    max_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradients are clipped to this norm."""


class AdamWConfig(_OptimizerConfig):
    """AdamW."""

    type: Literal["adamw"] = "adamw"
    """The optimizer: adamw, muon or sgd."""
    betas1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the first moment."""
    betas2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """Decay of the second moment."""


class MuonConfig(_OptimizerConfig):
    """Muon for the hidden matrices, AdamW for everything else."""

    type: Literal["muon"] = "muon"
    """The optimizer."""
    betas1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """First-moment decay of the AdamW part."""
    betas2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """Second-moment decay of the AdamW part."""


class SGDConfig(_OptimizerConfig):
    """Stochastic gradient descent."""

    type: Literal["sgd"] = "sgd"
    """The optimizer."""
    nesterov: bool = True
    """Nesterov momentum."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Momentum."""


OptimizerConfig = Annotated[AdamWConfig | MuonConfig | SGDConfig, Field(discriminator="type")]


class ConstantSchedulerConfig(BaseConfig):
    """A constant learning rate."""

    type: Literal["constant"] = "constant"
    """The schedule: constant, linear or cosine."""


class LinearSchedulerConfig(BaseConfig):
    """Linear warm-up, plateau, linear decay."""

    type: Literal["linear"] = "linear"
    """The schedule."""
    warmup: Annotated[int, Field(ge=0)] = 10
    """Steps of warm-up."""
    decay: Annotated[int, Field(ge=0)] = 10
    """Steps of decay at the end."""
    min_lr: Annotated[float, Field(ge=0.0)] = 0.0
    """Learning rate at the end."""


class CosineSchedulerConfig(BaseConfig):
    """Linear warm-up, then a half cosine."""

    type: Literal["cosine"] = "cosine"
    """The schedule."""
    warmup: Annotated[int, Field(ge=0)] = 10
    """Steps of warm-up."""
    min_lr: Annotated[float, Field(ge=0.0)] = 0.0
    """Learning rate at the end."""


SchedulerConfig = Annotated[
    ConstantSchedulerConfig | LinearSchedulerConfig | CosineSchedulerConfig, Field(discriminator="type")
]


class CheckpointWeightsConfig(BaseConfig):
    """How weights are written."""

    save_sharded: bool = True
    """Several files for a large model."""
    save_format: Literal["safetensors", "torch"] = "safetensors"
    """File format."""
    save_adapter_separately: bool = False
    """Write LoRA adapters on their own."""
    interval: PositiveInt | None = None
    """Keep the weights of every so many steps."""
    save_async: bool = True
    """Write in the background."""


class TrainerCheckpointConfig(BaseConfig):
    """The trainer's checkpoints."""

    interval: PositiveInt | None = None
    """Save every so many steps; None saves only on the way out."""
    resume_step: Annotated[int, Field(ge=-1)] | None = None
    """Resume from this step; -1 is the newest checkpoint there is."""
    keep: PositiveInt | None = None
    """Keep only so many of the newest checkpoints; None keeps all."""
    skip_progress: bool = False
    """On resume, start counting tokens and samples anew."""
    skip_scheduler: bool = False
    """On resume, start the learning-rate schedule anew."""
    skip_dataloader: bool = False
    """On resume, start with the data anew (fine-tuning)."""
    weights: CheckpointWeightsConfig = CheckpointWeightsConfig()
    """How weights are written."""


class FilesystemBroadcastConfig(BaseConfig):
    """Weights through files."""

    type: Literal["filesystem"] = "filesystem"
    """The way: filesystem or nccl."""
    save_sharded: bool = True
    """Several files for a large model."""
    save_format: Literal["safetensors", "torch"] = "safetensors"
    """File format."""


class NCCLBroadcastConfig(BaseConfig):
    """Weights through NCCL."""

    type: Literal["nccl"] = "nccl"
    """The way."""
    host: str = "localhost"
    """Host of the rendezvous."""
    port: int = 29501
    """Port of the rendezvous."""
    timeout: int = 1200
    """Seconds to wait for all engines."""
    inference_world_size: PositiveInt = 1
    """Number of engine ranks."""


WeightBroadcastConfig = Annotated[
    FilesystemBroadcastConfig | NCCLBroadcastConfig, Field(discriminator="type")
]


class FakeDataConfig(BaseConfig):
    """Batches of random tokens."""

    batch_size: PositiveInt = 2
    """Samples a step."""
    seq_len: PositiveInt = 128
    """Tokens a sample."""


class TrainerDataConfig(BaseConfig):
    """Where batches come from."""

    fake: FakeDataConfig | None = None
    """Train on random tokens instead of rollouts."""


class LossConfig(BaseConfig):
    """The masked importance-ratio policy gradient."""

    ratio_type: Literal["token", "sequence"] = "token"
    """Ratio of trainer to sampler probability per token, or per sequence (GSPO)."""
    ratio_length_norm: bool = False
    """Divide the sequence's log-ratio by its length."""
    mask_ratio_high: Annotated[float, Field(gt=0.0)] = 8.0
    """Tokens with a larger ratio are masked."""
    mask_ratio_low: Annotated[float, Field(ge=0.0)] = 0.125
    """Tokens with a smaller ratio are masked."""
    sequence_mask_ratio_low: Annotated[float, Field(ge=0.0)] = 0.0
    """Sequences that hold a token with a smaller ratio are masked; 0 is off."""
    kl_tau: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the log-ratio penalty."""
    kl_mask_type: Literal["all", "masked", "unmasked"] = "all"
    """Tokens that the penalty is on."""


class TrainerConfig(BaseConfig):
    """The trainer: batches in, weights out."""

    aliases: ClassVar[dict[str, str]] = {"async_level": "max_async_level"}

    model: TrainerModelConfig = TrainerModelConfig()
    """The model."""
    optim: OptimizerConfig = AdamWConfig()
    """The optimizer."""
    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """The learning-rate schedule."""
    loss: LossConfig = LossConfig()
    """The loss."""
    ckpt: TrainerCheckpointConfig | None = None
    """Checkpoints at an interval. Without it there is one on the way out."""
    weights: CheckpointWeightsConfig = CheckpointWeightsConfig()
    """How published weights are written."""
    weight_broadcast: WeightBroadcastConfig = FilesystemBroadcastConfig()
    """How weights reach the engines."""
    data: TrainerDataConfig = TrainerDataConfig()
    """Where batches come from."""
    log: LogConfig = LogConfig()
    """What is logged."""
    wandb: WandbConfig | None = None
    """Weights & Biases."""
    output_dir: Path = Path("outputs")
    """The run directory."""
    seq_len: PositiveInt = 2048
    """Tokens of a packed micro-batch; at least the orchestrator's seq_len."""
    max_steps: PositiveInt | None = None
    """Train until this step; None goes on for ever."""
    max_async_level: Annotated[int, Field(ge=0)] = 1
    """How many steps the rollouts may lag behind; 0 is synchronous."""
    seed: int = 0
    """Seed of everything random in the trainer."""
    bench: bool = False
    """Measure speed on random tokens."""
    batch_timeout: Annotated[float, Field(gt=0.0)] = 3600.0
    """Seconds to wait for the next batch."""
    dist_timeout_seconds: Annotated[int, Field(gt=0)] = 600
    """Seconds that ranks wait for each other, and the launcher for a last checkpoint."""
    memory_profiler_path: Path | None = None
    """Write a memory profile here."""
    trace_path: Path | None = None
    """Write a trace here."""
