"""Gradient of a batch, accumulated over micro-batches and ranks.

Samples run through the policy and, with `trainer.loss.kl_coef`, through a frozen reference model. This module
also computes the statistics of the step.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from buckeye.config.losses import LossConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import UsageError
from buckeye.trainer.data.chat_data import ChatSample
from buckeye.trainer.data.packing import PackedMicroBatch, pack_micro_batch
from buckeye.trainer.learner import Learner
from buckeye.trainer.losses.base import LossInputs
from buckeye.trainer.losses.policy_gradient import divisor, needs_every_sample, statistic_names, total_loss
from buckeye.trainer.losses.statistics import averages
from buckeye.trainer.losses.supervised import SupervisedSamples
from buckeye.trainer.micro_batches import run_micro_batches
from buckeye.trainer.model.adapter_files import merge_adapter_into
from buckeye.trainer.model.experts import load_metrics
from buckeye.trainer.parallel.fsdp import offloads, shard_policy
from buckeye.trainer.parallel.shards import fill_policy, prepare_policy
from buckeye.transport.batch_header import Tokens, UnreadTokens
from buckeye.transport.batches import Batch, Sample, read_samples

logger = logging.getLogger(__name__)

_PROBED_SAMPLES = 8
_SUPERVISED_SUMS = ("supervised/loss", "supervised/tokens")

ReferenceLogprobs = Callable[[PackedMicroBatch, Tensor], Tensor]
"""Function that returns the log-probs [N] of a row's targets under the reference model, without gradient. Its
arguments are the row, and the temperature [N] of each target.
"""


class BatchLoss:
    """Loss and gradient of batches on the policy of a learner."""

    def __init__(self, config: TrainerConfig, learner: Learner, reference: ReferenceLogprobs | None) -> None:
        self._config = config
        self._learner = learner
        self._reference = reference
        self._names = statistic_names(config.loss)
        self._sums = dict.fromkeys((*self._names, *_SUPERVISED_SUMS), 0.0)
        self.first_update: tuple[int, ...] = ()
        """By `id`: the samples of the first update of the step."""
        self._computed: set[int] = set()
        self.logprobs: dict[int, Tensor] = {}
        """By `id` of a sample: log-probs f32[trained tokens] of the samples of the step that this rank
        computed, at the weights before their first update.
        """

    def start_step(self) -> None:
        """Forget the log-probs and the statistics of the last step."""
        self.logprobs.clear()
        self._computed.clear()
        self.first_update = ()
        self._sums = dict.fromkeys(self._sums, 0.0)

    def backward(
        self, batch: Batch, samples: Sequence[Sample], supervised: SupervisedSamples | None = None
    ) -> float:
        """Add the gradient of this rank's part of a mini-batch. Return the loss over all ranks.

        `samples` are the samples of the mini-batch that run through the model. The loss is a mean over all
        samples of the mini-batch (`divisor`). After an update of the step, every token is one version older,
        because the updated policy is not the one that sampled it.

        The loss of `supervised` samples is added. They share micro-batches with the rollouts.
        """
        loss = self._config.loss
        trained = [s.facts.trained_tokens for s in batch.samples]
        scale = divisor(trained, loss, seq_len=self._config.seq_len)
        known = frozenset(self._computed)
        self.first_update = self.first_update if known else tuple(map(id, samples))
        self._computed.update(map(id, samples))
        version = batch.step + bool(known)
        chats = supervised.samples if supervised is not None else ()

        def work(indices: Sequence[int]) -> Mapping[str, float]:
            rollouts = [samples[i] for i in indices if i < len(samples)]
            others = [chats[i - len(samples)] for i in indices if i >= len(samples)]
            inputs, chat_logprobs = self._inputs(rollouts, version, others)
            counts = [sample.facts.trained_tokens for sample in rollouts]
            for sample, values in zip(rollouts, inputs.logprobs.detach().split(counts), strict=True):
                if id(sample) not in known:
                    self.logprobs[id(sample)] = values
            losses, statistics = [], dict[str, Tensor]()
            if rollouts:
                sums = total_loss(inputs, loss)
                losses, statistics = [sums.loss / scale], dict(sums.statistics)
            if supervised is not None and others:
                losses.append(supervised.loss(chat_logprobs))
                statistics["supervised/loss"] = -chat_logprobs.detach().sum()
                statistics["supervised/tokens"] = chat_logprobs.new_tensor(len(chat_logprobs))
            total = sum(losses[1:], start=losses[0])
            total.backward()
            values = torch.stack([total.detach(), *statistics.values()]).tolist()
            return dict(zip(("loss", *statistics), values, strict=True))

        def read(indices: Sequence[int]) -> None:
            read_samples(samples[i] for i in indices if i < len(samples))

        sums = run_micro_batches(
            self._learner, tokens_of(samples, supervised), work, ("loss", *self._sums), read=read
        )
        total = sums.pop("loss")
        self._sums = {name: self._sums[name] + value for name, value in sums.items()}
        return total

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Return the metrics of the step on `batch`: means over the tokens of all updates so far."""
        chat_tokens = self._sums["supervised/tokens"]
        supervised = {
            "supervised/loss": self._sums["supervised/loss"] / max(1.0, chat_tokens),
            "supervised/tokens": chat_tokens,
        }
        return {
            **(supervised if chat_tokens else {}),
            **averages({name: self._sums[name] for name in self._names}),
            **staleness(batch),
            **self._expert_metrics(),
            "zero_advantage_share": 1.0
            - sum(s.facts.has_advantage for s in batch.samples) / max(1, len(batch.samples)),
        }

    def _expert_metrics(self) -> dict[str, float]:
        """Return metrics of the experts' load on all ranks since the last call; empty without experts."""
        counts = self._learner.policy.expert_loads.take()
        return load_metrics(torch.stack(self._learner.ranks.all_gather(counts)).sum(0)) if len(counts) else {}

    def measure_change(self, batch: Batch, samples: Sequence[Sample]) -> dict[str, float]:
        """Return metrics of the change of the policy in an update, from a few samples.

        All ranks must call this method. `samples` are those passed to `backward` before the first update.
        `update/logprob_change` is the root mean square of the changes d of the tokens' log-probs, in nats.
        `update/agreement` is the cosine between d and the advantages A: sum(A d) / sqrt(sum(A^2) sum(d^2)).
        """
        ends = np.cumsum([sample.facts.trained_tokens for sample in samples])
        before = np.split(self.gather_logprobs(samples), ends)
        chosen = [i for i, sample in enumerate(samples) if sample.facts.has_advantage]
        chosen = chosen[: max(1, min(_PROBED_SAMPLES, len(chosen) // 8))]

        def work(indices: Sequence[int]) -> Mapping[str, float]:
            probed = [chosen[i] for i in indices]
            inputs, _ = self._inputs([samples[i] for i in probed], batch.step)
            known = torch.from_numpy(np.concatenate([before[i] for i in probed])).to(inputs.logprobs.device)
            change = (inputs.logprobs - known).nan_to_num()
            pairs = ((change, change), (inputs.advantages, inputs.advantages), (change, inputs.advantages))
            sums = [float((a * b).double().sum()) for a, b in pairs]
            return dict(zip(("tokens", "dd", "aa", "da"), (float(len(change)), *sums), strict=True))

        def read(indices: Sequence[int]) -> None:
            read_samples(samples[chosen[i]] for i in indices)

        with torch.no_grad():
            tokens = [samples[i].tokens for i in chosen]
            sums = run_micro_batches(self._learner, tokens, work, ("tokens", "dd", "aa", "da"), read=read)
        if not sums["tokens"]:
            return {}
        sizes = math.sqrt(sums["dd"] * sums["aa"])
        return {
            "update/logprob_change": math.sqrt(sums["dd"] / sums["tokens"]),
            **({"update/agreement": sums["da"] / sizes} if sizes else {}),
        }

    def gather_logprobs(self, samples: Sequence[Sample]) -> npt.NDArray[np.float32]:
        """Return the log-probs f32[M] of the M trained tokens of the samples passed to `backward`.

        The log-probs are in the order of the samples. A token that no rank computed has NaN. All ranks must
        call this method.
        """
        counts = [sample.facts.trained_tokens for sample in samples]
        local = torch.full((sum(counts),), math.nan)
        for sample, part in zip(samples, local.split(counts), strict=True):
            if id(sample) in self.logprobs:
                part.copy_(self.logprobs[id(sample)])
        merged, *others = self._learner.ranks.all_gather(local)
        for other in others:
            merged = torch.where(torch.isnan(merged), other, merged)
        return np.asarray(merged.cpu().numpy(), np.float32)

    def _inputs(
        self, samples: Sequence[Sample], version: int, chats: Sequence[ChatSample] = ()
    ) -> tuple[LossInputs, Tensor]:
        """Run a row of rollouts and conversations through the policy.

        Return the inputs of the loss of the rollouts, and the log-probs of the conversations' trained tokens.
        """
        policy = self._learner.policy
        every: Sequence[Sample | ChatSample] = (*samples, *chats)
        row = pack_micro_batch([s.token_ids for s in every], [s.loss_mask for s in every], policy.device)
        by_sample = [*(s.temperature for s in samples), *(1.0 for _ in chats)]
        temperatures = torch.tensor(by_sample, device=policy.device)[row.sequences]
        reference = None if self._reference is None else self._reference(row, temperatures)
        logprobs, entropies = policy(row, temperatures)
        count = sum(s.facts.trained_tokens for s in samples)
        if reference is not None:
            reference = reference[:count]
        inputs = _loss_inputs(
            row.sequences[:count], samples, version, logprobs[:count], entropies[:count], reference
        )
        return inputs, logprobs[count:]


def samples_to_train(batch: Batch, config: LossConfig) -> list[Sample]:
    """Return the samples that have a gradient.

    A sample with only zero advantages has no gradient, unless the loss has a KL or entropy term or is custom.
    Omitting the sample saves its forward pass. Statistics always include only samples with an advantage.
    """
    if needs_every_sample(config):
        return [s for s in batch.samples if s.facts.trained_tokens]
    return [s for s in batch.samples if s.facts.has_advantage]


def tokens_of(samples: Sequence[Sample], supervised: SupervisedSamples | None) -> list[Tokens | UnreadTokens]:
    """Return the token sequences of an update, in the order in which it numbers them."""
    chats = supervised.samples if supervised is not None else ()
    return [*(s.tokens for s in samples), *(s.token_ids for s in chats)]


def staleness(batch: Batch) -> dict[str, float]:
    """Return mean, maximum and distribution of the staleness of the trained tokens of a batch.

    The staleness of a token is the step minus the version of the weights that sampled the token. Only samples
    with an advantage count.
    """
    counts = Counter[int]()
    for sample in batch.samples:
        if sample.facts.has_advantage:
            counts.update({batch.step - version: n for version, n in sample.facts.versions.items()})
    tokens = counts.total()
    if not tokens:
        return {}
    return {
        "staleness_mean": sum(age * n for age, n in counts.items()) / tokens,
        "staleness_max": max(counts),
        **{f"staleness_share_{age}": n / tokens for age, n in sorted(counts.items())},
    }


def load_reference(config: TrainerConfig, learner: Learner) -> ReferenceLogprobs | None:
    """Return the reference model that the loss needs, or None without `kl_coef`.

    The reference model is sharded like the policy. If the run trains a new adapter on the reference model,
    the reference model is the policy without this adapter, and no second model is loaded. If the run started
    from an adapter, the reference model is a second model with this adapter. Raise `UsageError` if the
    vocabularies differ.
    """
    model, name = config.model, config.loss.reference_model
    if not config.loss.kl_coef:
        return None
    if model.experimental.lora is not None and name is None and model.adapter is None:
        reference = _reference_without_adapter(learner)
    else:
        adapter = model.adapter if name is None else None
        reference = _load_frozen_reference(name or model.name, adapter, config, learner)
    learner.reference_forwards.append(reference)
    return reference


def _loss_inputs(
    sequences: Tensor,
    samples: Sequence[Sample],
    version: int,
    logprobs: Tensor,
    entropies: Tensor,
    reference: Tensor | None,
) -> LossInputs:
    def column(name: str) -> Tensor:
        values = np.concatenate([getattr(s, name)[s.loss_mask] for s in samples] or [np.zeros(0)])
        return torch.from_numpy(values).to(logprobs.device)

    return LossInputs(
        logprobs=logprobs,
        entropies=entropies,
        sampler_logprobs=column("logprobs"),
        reference_logprobs=reference,
        advantages=column("advantages"),
        sequences=sequences,
        staleness=version - column("versions").long(),
    )


def _reference_without_adapter(learner: Learner) -> ReferenceLogprobs:
    from buckeye.trainer.model.lora import without_adapter  # the import takes seconds

    policy = learner.policy

    @torch.no_grad()
    def logprobs(row: PackedMicroBatch, temperatures: Tensor) -> Tensor:
        with without_adapter(policy.model):
            return policy(row, temperatures)[0]

    return logprobs


def _load_frozen_reference(
    source: str, adapter: Path | None, config: TrainerConfig, learner: Learner
) -> ReferenceLogprobs:
    logger.info("Loading the reference model %s", source)
    reference = prepare_policy(
        source,
        learner.policy.device,
        by_tensors=None if adapter is None else False,  # merging needs the whole model
        flash=config.model.attn != "sdpa",
        compute_dtype=config.model.compute_dtype,
        sharded=learner.ranks.mesh is not None,
    )
    vocabularies = [policy.vocab_size for policy in (reference, learner.policy)]
    if vocabularies[0] != vocabularies[1]:
        raise UsageError(
            f"the reference model {source!r} has a vocabulary of {vocabularies[0]} tokens, the trained model "
            f"of {vocabularies[1]}",
            code="BK-CONFIG-CONFLICT",
            at="trainer.loss.reference_model",
            hint="set it to a model with the same tokenizer",
        )
    if adapter is not None:
        merge_adapter_into(reference.model, source, adapter)
    reference.requires_grad_(False).eval()
    shard_policy(reference, config.model, learner.ranks)
    fill_policy(reference, source, offloaded=offloads(config.model, learner.policy.device))

    @torch.no_grad()
    def logprobs(row: PackedMicroBatch, temperatures: Tensor) -> Tensor:
        return reference(row, temperatures)[0]

    return logprobs
