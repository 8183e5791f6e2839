"""The frozen model that `trainer.loss.kl_coef` keeps the policy close to."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from buckeye.config.trainer import TrainerConfig
from buckeye.errors import UsageError
from buckeye.trainer.data.packing import PackedMicroBatch
from buckeye.trainer.learner import Learner
from buckeye.trainer.model.policy import load_policy
from buckeye.trainer.parallel.fsdp import shard_policy

logger = logging.getLogger(__name__)

ReferenceLogprobs = Callable[[PackedMicroBatch, Tensor], Tensor]
"""`(row, temperatures [N])` -> log-probabilities [N] of the row's targets under the reference, detached."""


def load_reference(config: TrainerConfig, learner: Learner) -> ReferenceLogprobs | None:
    """The reference that the loss asks for; None without `kl_coef`.

    It is divided among the ranks like the policy. A run that trains adapters on the model it is compared with
    needs no second copy. Raises `UsageError` if it has another vocabulary.
    """
    if not config.loss.kl_coef:
        return None
    if config.model.experimental.lora is not None and config.loss.reference_model is None:
        reference = _without_adapter(learner)
    else:
        reference = _frozen(config.loss.reference_model or config.model.name, config, learner)
    learner.reference_forwards.append(reference)
    return reference


def _without_adapter(learner: Learner) -> ReferenceLogprobs:
    from buckeye.trainer.model.lora import without_adapter  # takes seconds

    policy = learner.policy

    @torch.no_grad()
    def logprobs(row: PackedMicroBatch, temperatures: Tensor) -> Tensor:
        with without_adapter(policy.model):
            return policy.token_logprobs(row, temperatures)[0]

    return logprobs


def _frozen(source: str, config: TrainerConfig, learner: Learner) -> ReferenceLogprobs:
    logger.info("Loading the reference model %s", source)
    sharded = learner.ranks.mesh is not None
    reference = load_policy(
        source,
        learner.policy.device,
        flash=config.model.attn != "sdpa",
        compute_dtype=config.model.compute_dtype,
        sharded=sharded,
    )
    vocabularies = [policy.model.config.vocab_size for policy in (reference, learner.policy)]
    if vocabularies[0] != vocabularies[1]:
        raise UsageError(
            f"The reference model {source!r} has {vocabularies[0]} tokens and the trained one "
            f"{vocabularies[1]}: they cannot be compared. Set trainer.loss.reference_model to a model with "
            "the same tokenizer."
        )
    reference.module.requires_grad_(False).eval()
    shard_policy(reference, config.model, learner.ranks)

    @torch.no_grad()
    def logprobs(row: PackedMicroBatch, temperatures: Tensor) -> Tensor:
        return reference.token_logprobs(row, temperatures)[0]

    return logprobs
