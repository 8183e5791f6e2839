"""Functions that build the parts of a trainer from its configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from buckeye.base import heartbeat
from buckeye.base.process import cpu_threads, die_with_parent
from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import (
    LoRAConfig,
    SchedulerConfig,
    TrainerConfig,
)
from buckeye.errors import CheckpointError
from buckeye.monitor.log import run_log, setup_logging
from buckeye.trainer.learner import Learner
from buckeye.trainer.micro_batch_size import load_micro_batch_size
from buckeye.trainer.model.adapter_files import ADAPTER_DIRECTORY, merge_adapter_into, read_adapter
from buckeye.trainer.model.policy import PolicyNetwork, pick_device
from buckeye.trainer.optim.optimizer import LearningRateSchedule, build_optimizer
from buckeye.trainer.output.hf_directory import read_tokenizer_files
from buckeye.trainer.output.state import load_state
from buckeye.trainer.parallel.fsdp import offloads, shard_policy
from buckeye.trainer.parallel.ranks import Ranks, join_ranks, local_rank
from buckeye.trainer.parallel.shards import fill_policy, prepare_policy
from buckeye.transport.checkpoint import (
    MODEL_DIRECTORY,
    CheckpointInfo,
    find_usable_checkpoint,
    trainer_state_directory,
    verify_checkpoint,
)

logger = logging.getLogger(__name__)


@contextmanager
def trainer_process(config: TrainerConfig | SFTConfig, name: str) -> Iterator[Ranks]:
    """Set up this process as a rank of a trainer, with threads, seed, log, device and communication."""
    die_with_parent()
    heartbeat.start()
    torch.set_num_threads(cpu_threads())
    torch.manual_seed(config.seed % 2**64)
    # cuDNN's attention prepares every new shape, and every row has a different shape
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = pick_device(config.model.device, local_rank())
    ranks = join_ranks(device, config.model, timeout_seconds=config.dist_timeout_seconds)
    process = name if ranks.is_rank_zero else f"{name} rank {ranks.rank}"
    setup_logging(config.log.level, process, run_log(config.output_dir))
    try:
        yield ranks
    finally:
        ranks.close()


def find_resume_checkpoint(config: TrainerConfig | SFTConfig, ranks: Ranks) -> CheckpointInfo | None:
    """Return the checkpoint to resume from, or None to start from the model.

    All ranks must call this function. Each rank verifies a part of the files.
    """
    if config.ckpt is None or config.ckpt.resume_step is None:
        return None
    root, step = config.output_dir / "checkpoints", config.ckpt.resume_step

    def verify(info: CheckpointInfo) -> None:
        error: CheckpointError | None = None
        try:
            verify_checkpoint(info, share=ranks.rank, shares=ranks.world_size)
        except CheckpointError as damage:
            error = damage
        if ranks.max(int(error is not None)):
            raise error or CheckpointError(
                f"the checkpoint of step {info.step} is damaged: another rank found a damaged file",
                code="BK-CHECKPOINT-DAMAGED",
                hint="see the logs of the other ranks",
            )

    info = find_usable_checkpoint(root, step, verify)
    logger.info("Resuming training from checkpoint step `%d`", info.step)
    return info


def build_learner(
    config: TrainerConfig | SFTConfig, ranks: Ranks, resume: CheckpointInfo | None, *, max_steps: int | None
) -> Learner:
    """Return a new learner, or one with the state of the checkpoint `resume`.

    The learning-rate schedule ends at `max_steps`.
    """
    source = _model_source(config, resume)
    policy = _load_policy(source, config, ranks)
    lora, adapter = config.model.experimental.lora, config.model.adapter if resume is None else None
    if lora is not None:
        _add_adapter(policy, lora, source)
    elif adapter is not None:
        merge_adapter_into(policy.model, source, adapter)
        logger.info("Merged the adapter %s into the model", adapter)
    shard_policy(policy, config.model, ranks)
    fill_policy(policy, source, offloaded=offloads(config.model, ranks.device))
    if lora is not None:
        directory = adapter if resume is None else trainer_state_directory(resume) / ADAPTER_DIRECTORY
        _set_adapter(policy, directory)
    _warn_about_schedule(config.scheduler, max_steps)
    learner = Learner(
        policy,
        build_optimizer(policy.trainable, config.optim, embeddings=policy.embedding_names),
        LearningRateSchedule(config=config.scheduler, peak=config.optim.lr, max_steps=max_steps),
        ranks,
        read_tokenizer_files(source),
        load_micro_batch_size(config, ranks),
        max_norm=config.optim.max_norm,
        reduce_dtype=getattr(torch, config.model.reduce_dtype),
    )
    if resume is not None and config.ckpt is not None:
        load_state(learner, trainer_state_directory(resume), skip_data=config.ckpt.skip_dataloader)
    return learner


def _model_source(config: TrainerConfig | SFTConfig, resume: CheckpointInfo | None) -> str:
    """Return the name or directory of the model to load.

    With an adapter, this is always the configured base model, because checkpoints do not contain it.
    """
    if resume is None or config.model.experimental.lora is not None:
        return config.model.name
    model = trainer_state_directory(resume) / MODEL_DIRECTORY
    if not model.is_dir():
        raise CheckpointError(
            f"the checkpoint {resume.path} has an adapter instead of a complete model",
            code="BK-CHECKPOINT-MISMATCH",
            hint="set trainer.model.experimental.lora as in the earlier attempt, or start a new run",
        )
    return str(model)


def _add_adapter(policy: PolicyNetwork, lora: LoRAConfig, base: str) -> None:
    """Freeze the policy, and add an adapter, whose values `_set_adapter` sets."""
    from buckeye.trainer.model.lora import add_adapter  # the import takes seconds

    add_adapter(policy.model, lora, base=base, frozen_dtype=policy.compute_dtype)
    logger.info(
        "Training %d parameters of the adapter; %d parameters of the model are frozen",
        sum(p.numel() for p in policy.trainable.values()),
        sum(p.numel() for p in policy.model.parameters() if not p.requires_grad),
    )


def _set_adapter(policy: PolicyNetwork, directory: Path | None) -> None:
    """Set the adapter's values from `directory`, or to the first values if it is None."""
    from buckeye.trainer.model.lora import set_adapter  # the import takes seconds

    set_adapter(policy.model, None if directory is None else read_adapter(policy.model, directory))
    if directory is not None:
        logger.info("Continuing the training of the adapter %s", directory)


def _load_policy(source: str, config: TrainerConfig | SFTConfig, ranks: Ranks) -> PolicyNetwork:
    """Return the policy of the model `source`. `fill_policy` completes it."""
    model, sharded = config.model, ranks.mesh is not None
    by_tensors = model.load_using_meta
    if source != model.name:  # a checkpoint
        by_tensors = None
    elif model.adapter is not None and model.experimental.lora is None:  # merging needs the whole model
        by_tensors = False
    elif by_tensors and not sharded:
        by_tensors = None
    policy = prepare_policy(
        source,
        ranks.device,
        by_tensors=by_tensors,
        flash=model.attn != "sdpa",
        compute_dtype=model.compute_dtype,
        sharded=sharded,
        frozen=model.experimental.lora is not None,
        quantization=model.quantization,
    )
    if model.ac is not None or model.ac_offloading is not None:
        policy.checkpoint_activations(
            every=1 if model.ac is None else model.ac.freq,
            offload=model.ac_offloading is not None and ranks.device.type == "cuda",
        )
    if model.compile is not None:
        # With flash attention, one compiled layer works for all layers and for rows of any layout.
        parts = policy.model.base_model.layers if policy.flash else [policy.model.base_model]
        for part in parts:
            part.compile(dynamic=True)
    return policy


def _warn_about_schedule(scheduler: SchedulerConfig, max_steps: int | None) -> None:
    """Log a warning if warm-up and decay together have more steps than the run."""
    warmup, decay = getattr(scheduler, "warmup", 0), getattr(scheduler, "decay", 0)
    if max_steps is not None and warmup + decay > max_steps:
        logger.warning(
            "scheduler.warmup = %d and scheduler.decay = %d exceed the %d steps of the run: the lr %s",
            warmup,
            decay,
            max_steps,
            "never reaches its peak" if warmup > max_steps else "falls right after the warm-up",
        )
