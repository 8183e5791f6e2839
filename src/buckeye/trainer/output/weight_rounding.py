"""Rounding of trained weights to published weights, measurement of the effect, and computation of the canary.

The trainer has float32 weights, and engines usually get 16-bit weights. Rounding to nearest removes a change
of a weight that is smaller than half the distance between two 16-bit numbers.

The canary is a short greedy continuation with its log-probs. After an update, each engine must compute nearly
equal log-probs.
"""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from buckeye.errors import RunError
from buckeye.trainer.model.policy import PolicyNetwork, set_dropout
from buckeye.transport.batches import Sample
from buckeye.transport.weights import Canary

logger = logging.getLogger(__name__)

KL_WARNING_THRESHOLD = 0.02
"""Limit of the KL divergence, in nats per token, before a warning is logged. At the limit, log-probs differ
by about sqrt(2 * 0.02) = 0.2, which is the usual clip range of one training step.
"""
_SAMPLED_WEIGHTS = 4_000_000  # number of weights to compare, spread over all parameters
_SAMPLES = 4
_CONTEXT = 512  # number of tokens at the start of a sample that the model reads
_POSITIONS = 32  # number of positions of a sample at which the next-token distributions are compared
_CANARY_PROMPT = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid. One, two, "
    "three, four, five, six, seven, eight, nine,"
)
_CANARY_PROMPT_TOKENS = 8, 24  # minimum and maximum, which fits into every context
_CANARY_TOKENS = 4
_DROPPED_BITS = 16  # a bfloat16 is the upper half of a float32
_CHUNK_ELEMENTS = 2**18  # number of weights that fit the cache of a processor


class RoundingMonitor:
    """Comparison of trained weights with published weights.

    A comparison is due after every `interval` steps, and after the steps 1, 2, 4, 8, ... below `interval`.
    `published` are the published values of the initial weights, by name. The model must not be sharded, and
    not have an adapter.
    """

    def __init__(self, policy: PolicyNetwork, published: Mapping[str, Tensor], *, interval: int) -> None:
        self._policy = policy
        self._interval = interval
        self._stride = max(1, sum(p.numel() for p in policy.trainable.values()) // _SAMPLED_WEIGHTS)
        self._initial = self._sample_weights(published)
        self._has_warned = False

    def is_due(self, step: int) -> bool:
        """Return True if the weights must be compared after this step."""
        return step % self._interval == 0 or (step < self._interval and step & (step - 1) == 0)

    def measure(self, published: Mapping[str, Tensor], samples: Iterable[Sample]) -> dict[str, float]:
        """Return the metrics of the comparison of the current weights with their published values.

        `weights/changed_share` is the share of the weights whose published value has changed since the start
        of this process. `weights/arrived_share` is sum(d * D) / sum(D * D), where D are the changes of the
        trained weights and d the changes of the published weights. It is 1 if rounding removes no change.
        `weights/served_kl` is KL(trained || published) of the next token in nats, as a mean over trained
        positions of `samples`. Both models compute in float32.
        """
        values = {**self._changes(published), **self._divergence(published, samples)}
        kl = values.get("weights/served_kl", 0.0)
        if kl > KL_WARNING_THRESHOLD and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Rounding changes the published weights: %.0f %% of the weight change reaches the engines, "
                "and the KL divergence is %.2g nats a token (limit %g). Set trainer.weights.dtype and "
                'inference.model.dtype to "float32", or trainer.weights.rounding = "stochastic"; see '
                "docs/explanation/precision.md",
                100 * values.get("weights/arrived_share", 0.0),
                kl,
                KL_WARNING_THRESHOLD,
            )
        return values

    def _sample_weights(self, published: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return some weights, trained and published, as float32 on the CPU."""
        trained = {name: parameter.detach() for name, parameter in self._policy.trainable.items()}
        sampled = [
            torch.cat([values[name].flatten()[:: self._stride].float().cpu() for name in trained])
            for values in (trained, published)
        ]
        return sampled[0], sampled[1]

    def _changes(self, published: Mapping[str, Tensor]) -> dict[str, float]:
        trained, stored = self._sample_weights(published)
        change, arrived = trained - self._initial[0], stored - self._initial[1]
        values = {"weights/changed_share": float((arrived != 0).double().mean())}
        size = float(change.double().square().sum())
        if size:
            values["weights/arrived_share"] = float((change * arrived).double().sum()) / size
        return values

    @torch.no_grad()
    def _divergence(self, published: Mapping[str, Tensor], samples: Iterable[Sample]) -> dict[str, float]:
        model, exact = self._policy.model, copy.copy(self._policy)  # a new policy adds hooks to the experts
        exact.compute_dtype, exact.flash = torch.float32, False
        stored = {parameter: published[name] for name, parameter in model.named_parameters()}
        head = published[next(n for n, p in model.named_parameters() if p is exact.head_weight)]
        total, positions = 0.0, 0
        set_dropout(model, active=False)
        for sample in islice((s for s in samples if s.loss_mask[:_CONTEXT].any()), _SAMPLES):
            trained = _next_token_logprobs(exact, sample)
            with _use_stored_weights(model, stored):
                served = _next_token_logprobs(exact, sample, head.to(exact.head_weight))
            total += float((trained.exp() * (trained - served)).sum(-1).double().sum())
            positions += len(trained)
        set_dropout(model, active=True)
        # rounding errors may make the mean negative
        return {"weights/served_kl": max(0.0, total / positions)} if positions else {}


def canary_prompt(tokenizer_files: Mapping[str, bytes], vocabulary: int) -> list[int]:
    """Return the token ids of a natural text: a trained model is sure of its continuation.

    Without a usable `tokenizer.json`, return tokens that are spread over the vocabulary.
    """
    least, most = _CANARY_PROMPT_TOKENS
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_files["tokenizer.json"])
        ids = [i for i in tokenizer.encode(_CANARY_PROMPT).ids if i < vocabulary][-most:]
    except Exception:  # the library raises no narrower one
        ids = []
    return ids if len(set(ids)) >= least else [i * vocabulary // least for i in range(least)]


@torch.no_grad()
def make_canary(
    policy: PolicyNetwork,
    stored: torch.dtype = torch.float32,
    *,
    prompt: Sequence[int] = (),
    guess: Sequence[int] = (),
) -> Canary:
    """Return the canary: the four greedy tokens after `prompt`, or after tokens spread over the vocabulary.

    The canary does not depend on `guess`, which has the expected tokens. A correct guess saves three of four
    forward passes. Ranks that share a model must not guess, because the number of passes must be equal.
    The dtype of the canary is the narrower one of the compute dtype and the `stored` dtype of the weights.
    """
    set_dropout(policy.model, active=False)
    prompt = prompt or canary_prompt({}, policy.vocab_size)
    tokens = list(guess) or [0] * _CANARY_TOKENS
    logprobs: list[float] = []
    margins: list[float] = []
    for _ in range(_CANARY_TOKENS):  # each pass corrects at least one more token
        inputs = tokens[:-1]
        ids = torch.tensor([*prompt, *inputs], device=policy.device)
        best = policy.logits(ids, slice(-_CANARY_TOKENS, None)).log_softmax(-1).topk(2)
        tokens, logprobs = best.indices[:, 0].tolist(), best.values[:, 0].tolist()
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        if guess and inputs == tokens[:-1]:
            break
    set_dropout(policy.model, active=True)
    return Canary(
        dtype=str(min(policy.compute_dtype, stored, key=lambda dtype: dtype.itemsize)).removeprefix("torch."),
        prompt_ids=list(prompt),
        token_ids=tokens,
        logprobs=logprobs,
        margins=margins,
    )


def empty_published(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty tensor for the rounded values of a tensor. Integer tensors keep their dtype."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=kind, device=device)


def round_tensor(name: str, tensor: Tensor, *, seed: int | None, out: Tensor) -> Tensor:
    """Round a tensor to the dtype of `out`, write the result to `out`, and return it.

    Round to nearest; with a `seed`, round to bfloat16 stochastically. The random bits depend only on `seed`
    and the name of the tensor. So two versions of the weights differ only in weights that training has
    changed. Raise `RunError` for a weight that is too large for float16.
    """
    if seed is not None and out.dtype is torch.bfloat16:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        return round_stochastically(tensor.to("cpu", torch.float32), generator, out)
    out.copy_(tensor)
    if out.dtype is torch.float16 and not torch.equal(out.isfinite().cpu(), tensor.isfinite().cpu()):
        raise RunError(
            f"a weight of {name} is {float(tensor.abs().max()):.3g}, beyond the float16 maximum of 65504",
            code="BK-TRAINING",
            hint='set trainer.weights.dtype = "bfloat16"',
        )
    return out


def round_stochastically(x: Tensor, generator: torch.Generator, out: Tensor | None = None) -> Tensor:
    """Round float32 to one of the two neighboring bfloat16 values, and write them to `out`. CPU only.

    The probability of a neighbor is such that the mean of the rounded value is the value (Gupta et al. 2015,
    arXiv:1502.02551, section 3).

    A finite value never becomes infinite.
    """
    rounded = torch.empty(x.shape, dtype=torch.bfloat16) if out is None else out
    values = x.contiguous().view(-1).split(_CHUNK_ELEMENTS)
    for part, target in zip(values, rounded.view(-1).split(_CHUNK_ELEMENTS), strict=True):
        target.copy_(_round_chunk(part, generator))
    return rounded


def _next_token_logprobs(policy: PolicyNetwork, sample: Sample, head: Tensor | None = None) -> Tensor:
    """Return the next-token log-probs at trained positions of a sample, float32 [positions, vocabulary]."""
    ids = torch.from_numpy(sample.token_ids[:_CONTEXT]).long().to(policy.device)
    positions = torch.from_numpy(sample.loss_mask[:_CONTEXT]).nonzero()[:_POSITIONS, 0].to(policy.device) - 1
    return policy.logits(ids, positions, head=head).log_softmax(-1)


@contextmanager
def _use_stored_weights(model: nn.Module, stored: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Let every module compute with its published parameters inside this context.

    Each module converts its parameters before it computes, and restores them afterwards. So the context needs
    no second model.
    """
    exact: dict[nn.Parameter, Tensor] = {}

    def before(module: nn.Module, inputs: Any) -> None:
        del inputs
        for parameter in module.parameters(recurse=False):
            exact[parameter] = parameter.data
            parameter.data = stored[parameter].to(parameter)

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        del inputs, output
        restore(module.parameters(recurse=False))

    def restore(parameters: Iterator[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in exact:
                parameter.data = exact.pop(parameter)

    hooks = []
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        restore(iter(list(exact)))


def _round_chunk(x: Tensor, generator: torch.Generator) -> Tensor:
    """Add a random 16-bit number to the bits of each float32, then return the upper 16 bits as bfloat16."""
    bits = x.view(torch.int32)
    random = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    added = random.view(torch.int16)[: x.numel()].to(torch.int32).bitwise_and_((1 << _DROPPED_BITS) - 1)
    rounded = _upper_half(added.add_(bits))
    if x.abs().amax() < torch.finfo(torch.bfloat16).max:
        return rounded
    rounded = torch.where(rounded.isfinite(), rounded, _upper_half(bits))
    return torch.where(x.isfinite(), rounded, x.to(torch.bfloat16))


def _upper_half(bits: Tensor) -> Tensor:
    return (bits >> _DROPPED_BITS).to(torch.int16).view(torch.bfloat16)
