"""From a trainer's configuration to its parts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from buckeye.checkpoint import CheckpointInfo, resolve_checkpoint, trainer_state, verify_checkpoint
from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import (
    ConstantSchedulerConfig,
    LinearSchedulerConfig,
    OptimizerConfig,
    SchedulerConfig,
    SGDConfig,
    TrainerConfig,
)
from buckeye.errors import UsageError
from buckeye.monitor.log import run_log, setup_logging
from buckeye.process import cpu_threads, die_with_parent
from buckeye.trainer.distributed import Ranks, join_ranks, local_rank
from buckeye.trainer.export import read_tokenizer_files
from buckeye.trainer.learner import Learner, Schedule
from buckeye.trainer.model import Policy, load_policy, pick_device
from buckeye.trainer.optim import NamedOptimizer, build_optimizer

logger = logging.getLogger(__name__)


@contextmanager
def trainer_process(config: TrainerConfig | SFTConfig, name: str) -> Iterator[Ranks]:
    """Make this process a rank of a trainer: threads, seed, log file, device, communication."""
    die_with_parent()
    torch.set_num_threads(cpu_threads())
    torch.manual_seed(config.seed)
    device = pick_device(config.model.device, local_rank())
    ranks = join_ranks(device, timeout_seconds=config.dist_timeout_seconds)
    process = name if ranks.first else f"{name} rank {ranks.rank}"
    setup_logging(config.log.level, process, run_log(config.output_dir) if config.log.file else None)
    try:
        yield ranks
    finally:
        ranks.leave()


def find_resume(config: TrainerConfig | SFTConfig) -> CheckpointInfo | None:
    """The checkpoint to go on from, verified; None to start from the model."""
    if config.ckpt is None or config.ckpt.resume_step is None:
        return None
    info = resolve_checkpoint(config.output_dir / "checkpoints", config.ckpt.resume_step)
    verify_checkpoint(info)
    logger.info("Resuming training from checkpoint step `%d`", info.step)
    return info


def build_learner(
    config: TrainerConfig | SFTConfig, ranks: Ranks, resume: CheckpointInfo | None, *, max_steps: int | None
) -> Learner:
    """The learner at the run's start, or as it was at the checkpoint. The schedule ends at `max_steps`."""
    source = config.model.name if resume is None else str(trainer_state(resume) / "model")
    policy = _load(source, config, ranks.device)
    learner = Learner(
        policy,
        _optimizer(policy, config.optim),
        _schedule(config.scheduler, peak=config.optim.lr, max_steps=max_steps),
        ranks,
        read_tokenizer_files(source),
        max_norm=config.optim.max_norm,
    )
    if resume is not None and config.ckpt is not None:
        learner.load(
            trainer_state(resume),
            skip_progress=config.ckpt.skip_progress,
            skip_schedule=config.ckpt.skip_scheduler,
            skip_data=config.ckpt.skip_dataloader,
        )
    return learner


def _load(source: str, config: TrainerConfig | SFTConfig, device: torch.device) -> Policy:
    model = config.model
    policy = load_policy(source, device, flash=model.attn != "sdpa")
    if model.ac is not None:
        policy.checkpoint_activations(every=model.ac.freq)
    if model.compile is not None:
        if model.compile.fullgraph and not policy.flash:
            raise UsageError("trainer.model.compile.fullgraph needs a GPU and attn = 'flash_attention_2'.")
        policy.model.base_model.compile(fullgraph=model.compile.fullgraph, dynamic=True)
    return policy


def _optimizer(policy: Policy, optim: OptimizerConfig) -> NamedOptimizer:
    if isinstance(optim, SGDConfig):
        return build_optimizer(
            policy.trainable,
            kind="sgd",
            weight_decay=optim.weight_decay,
            momentum=optim.momentum,
            nesterov=optim.nesterov,
        )
    return build_optimizer(
        policy.trainable,
        kind=optim.type,
        weight_decay=optim.weight_decay,
        betas=(optim.betas1, optim.betas2),
        embeddings=policy.embedding_names,
    )


def _schedule(scheduler: SchedulerConfig, *, peak: float, max_steps: int | None) -> Schedule:
    if isinstance(scheduler, ConstantSchedulerConfig):
        return Schedule(schedule="constant", peak=peak)
    return Schedule(
        schedule=scheduler.type,
        peak=peak,
        warmup=scheduler.warmup,
        decay=scheduler.decay if isinstance(scheduler, LinearSchedulerConfig) else 0,
        min_lr=scheduler.min_lr,
        max_steps=max_steps,
    )
