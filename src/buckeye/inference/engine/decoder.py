"""Forward pass: prefill of prompts into the cache, and one decode step for all running sequences."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from buckeye.inference.engine.architecture import ModelSpec
from buckeye.inference.engine.kv_cache import KVCache
from buckeye.inference.engine.model_fields import Activation
from buckeye.inference.engine.rotary import rotation_tables
from buckeye.inference.engine.weights import DecoderWeights, LayerWeights

log = logging.getLogger(__name__)

_LENGTH_BUCKET = 16
_SCORED_ROWS = 1024  # rows of logits at a time
_CHECK_ROWS, _CHECK_POSITIONS = 3, (0, 63, 64, 1000)
_MAX_DIFFERENCE = 0.05  # several times the usual difference between two rounding orders in bfloat16

DecodeStep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that computes the logits of tokens [B] at positions [B]."""


class Chunk(NamedTuple):
    """Tokens to prefill into a slot. The first token has position `start`; earlier positions are cached."""

    slot: int
    token_ids: torch.Tensor
    start: int = 0

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


Rotations = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Cosine and sine of tokens, [N, 1, width] each, for each distinct rotary position embedding."""
_ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class _LayerCache(NamedTuple):
    """Cache of one layer, and two views of it, [B, K, T, D] each: the keys and values of a decode step."""

    kv: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def batch_chunks(chunks: Iterable[Chunk], tokens: int) -> Iterator[list[Chunk]]:
    """Yield the chunks in batches, in order. A batch ends when it has `tokens` tokens or more."""
    batch: list[Chunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk.token_ids)
        if size >= tokens:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Decoder:
    """Model that computes logits from `weights`, and keeps the keys and values of its tokens in `cache`.

    Letters in shapes: N tokens, B sequences, H query heads, K key/value heads, G = H / K, D head_dim, T
    positions.
    """

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, cache: KVCache) -> None:
        self.spec = spec
        self.weights = weights
        self.cache = cache
        kv = cache.kv
        self.device = kv.device
        ropes = list(dict.fromkeys(layer.rope for layer in spec.layers if layer.rope is not None))
        self._tables = [rotation_tables(r, cache.max_len, dtype=kv.dtype, device=kv.device) for r in ropes]
        self._table_of_layer = [None if rope is None else ropes.index(rope) for _, rope in spec.layers]
        self._windows = [layer.window for layer in spec.layers]
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=kv.dtype).item()
        self._positions = torch.arange(cache.max_len, device=kv.device)
        self._slots = torch.arange(cache.slots, device=kv.device)
        self._root_eps = torch.tensor(math.sqrt(spec.rms_eps), device=kv.device)
        self._can_capture = kv.is_cuda and spec.is_plain
        self._captured: DecodeStep | None = None
        self._caches: tuple[torch.Tensor, ...] = ()
        self._views: tuple[tuple[int, int], list[_LayerCache]] = ((0, 0), [])
        if cache.is_allocated:
            self._use_cache()

    def release_cache(self) -> None:
        """Free the cache, the graphs of decode steps, and unused memory of the allocator."""
        self._caches, self._captured, self._views = (), None, ((0, 0), [])
        self.cache.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore_cache(self) -> None:
        """Allocate the cache again, after `release_cache`."""
        self.cache.allocate()
        self._use_cache()

    def _use_cache(self) -> None:
        self._caches = self.cache.kv.unbind(0)
        if self._can_capture:
            self._captured = self._captured_decode()
            self._can_capture = self._captured is not None

    def _captured_decode(self) -> DecodeStep | None:
        """Return the decode step that runs as one CUDA graph.

        Return None if Triton fails, or if the logits of this step differ from those of `_decode`.
        """
        try:
            from buckeye.inference.engine.captured_decode import CapturedDecode

            step = CapturedDecode(self.spec, self.weights, self.cache, self._tables[0])
            difference = self._difference(step)
        except Exception as error:  # Triton, its compiler and the driver raise many exceptions
            log.warning("Triton is unavailable, so sampling is slower: %s", error)
            return None
        if not difference < _MAX_DIFFERENCE:
            log.warning(
                "The CUDA graph of a decode step is inaccurate by %.0f%% and is not used; sampling is slower",
                100 * difference,
            )
            return None
        return step

    @torch.inference_mode()
    def _difference(self, step: DecodeStep) -> float:
        """Return the largest |a - b| / |b| over several positions; `step` computes logits a, and `_decode` b.

        The function overwrites the cache with random keys and values, and afterwards with zeros.
        """
        count, last = min(self.cache.slots, _CHECK_ROWS), self.cache.max_len - 1
        tokens = torch.arange(count, device=self.device) % self.spec.vocab_size
        cache = self.cache.kv[:, :count]
        cache.normal_()
        differences = []
        for position in sorted({min(p, last) for p in (*_CHECK_POSITIONS, last)}):
            positions = (position - torch.arange(count, device=self.device)).clamp_(min=0)
            logits = step(tokens, positions).clone()
            expected = self._decode(tokens, positions, position + 1)
            differences.append((logits - expected).norm() / expected.norm())
        cache.zero_()
        return float(torch.stack(differences).max())  # NaN if any difference is NaN

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """Feed tokens [B] at positions [B] to slots 0..B-1. Return logits, float32 [B, vocab].

        `longest` is the length of the longest sequence, with its new token. The next call may overwrite the
        returned logits.
        """
        if self._captured is not None:
            try:
                return self._captured(tokens, positions)
            except torch.AcceleratorError:
                raise  # the GPU rejects all further work of this process
            except Exception as error:  # capturing a new number of sequences may run out of memory
                log.warning("Cannot capture a decode step, so sampling is slower: %s", error)
                self._captured = None
        return self._decode(tokens, positions, longest)

    def _decode(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        spec, count = self.spec, tokens.shape[0]
        length = min(self.cache.max_len, -(-longest // _LENGTH_BUCKET) * _LENGTH_BUCKET)
        rows = self._slots[:count]
        masks = {window: self._decode_mask(positions, length, window) for window in set(self._windows)}
        x, rotations = self._embed(tokens, positions)
        weights = self.weights.current
        views = self._cache_views(count, length)
        for index, (layer, (kv, keys, values)) in enumerate(zip(weights.layers, views, strict=True)):
            qkv = self._project(x, layer, self._rotation(index, rotations))
            kv[rows, :, positions] = qkv[:, spec.num_heads :]
            # Pass the queries of a group as positions of their key head, so that the kernel reads keys once.
            query = qkv[:, : spec.num_heads].view(count, spec.num_kv_heads, -1, spec.head_dim)  # [B, K, G, D]
            mask = masks[self._windows[index]]
            attended = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=spec.attention_scale
            )
            x = self._finish_layer(x, attended.reshape(count, -1), layer)
        return self._logits(weights.head(self._norm(x, weights.final_norm)))

    def _logits(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        if self.spec.logits_divisor != 1:
            logits = logits / self.spec.logits_divisor
        cap = self.spec.logits_cap
        return logits if cap is None else (logits / cap).tanh_().mul_(cap)

    def _decode_mask(self, positions: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
        """Return the mask to add to the scores, [B, 1, 1, length]: 0 for keys in the window, else -inf."""
        keys, queries = self._positions[:length], positions[:, None]
        hidden = keys > queries
        if window is not None and window < length:
            hidden |= keys <= queries - window
        mask = torch.zeros(len(positions), length, dtype=self.cache.kv.dtype, device=self.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None]

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Compute the keys and values of all chunks in one packed batch, and write them into the slots."""
        spec = self.spec
        lengths = [len(chunk.token_ids) for chunk in chunks]
        tokens = torch.cat([chunk.token_ids for chunk in chunks]).to(self.device)
        positions = torch.cat([self._positions[chunk.start : chunk.end] for chunk in chunks])
        x, rotations = self._embed(tokens, positions)
        masks = {w: [_causal_mask(chunk, w, self.device) for chunk in chunks] for w in set(self._windows)}
        layers = self.weights.current.layers
        for index, (layer, kv) in enumerate(zip(layers, self._caches, strict=True)):
            qkv = self._project(x, layer, self._rotation(index, rotations))
            heads = [part.transpose(0, 1) for part in qkv.split(lengths)]  # [H + 2K, T, D] each
            for chunk, part in zip(chunks, heads, strict=True):
                kv[chunk.slot, :, chunk.start : chunk.end] = part[spec.num_heads :]
            if layer is layers[-1]:
                return  # the remaining operations only compute logits, which prefill does not need
            parts = zip(heads, chunks, masks[self._windows[index]], strict=True)
            attended = torch.cat([self._attend_causally(*part, kv) for part in parts])
            x = self._finish_layer(x, attended, layer)

    @torch.inference_mode()
    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token t | tokens before t) for all tokens but the first one, without the cache."""
        tokens = torch.tensor(token_ids, device=self.device)
        whole = Chunk(0, tokens)
        x, rotations = self._embed(tokens, self._positions[: len(tokens)])
        masks = {window: _causal_mask(whole, window, self.device) for window in set(self._windows)}
        weights = self.weights.current
        for index, (layer, kv) in enumerate(zip(weights.layers, self._caches, strict=True)):
            heads = self._project(x, layer, self._rotation(index, rotations)).transpose(0, 1)
            attended = self._attend_causally(heads, whole, masks[self._windows[index]], kv)
            x = self._finish_layer(x, attended, layer)
        hidden = self._norm(x[:-1], weights.final_norm)
        found = [
            -F.cross_entropy(self._logits(weights.head(part)), targets, reduction="none")
            for part, targets in zip(hidden.split(_SCORED_ROWS), tokens[1:].split(_SCORED_ROWS), strict=True)
        ]
        return [float(value) for part in found for value in part.cpu()]

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Rotations]:
        x = F.embedding(tokens, self.weights.current.embed)
        if self._embedding_scale != 1:
            x *= self._embedding_scale
        return x, [(cos[positions][:, None], sin[positions][:, None]) for cos, sin in self._tables]

    def _rotation(self, index: int, rotations: Rotations) -> tuple[torch.Tensor, torch.Tensor] | None:
        table = self._table_of_layer[index]
        return None if table is None else rotations[table]

    def _cache_views(self, count: int, length: int) -> list[_LayerCache]:
        """Return views of the first `length` positions of slots 0..count-1.

        The views are cached, because most steps need the views of the step before.
        """
        if self._views[0] != (count, length):
            views = [_LayerCache(kv, *kv[:count, :, :length].chunk(2, 1)) for kv in self._caches]
            self._views = ((count, length), views)
        return self._views[1]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight, over the last dimension; x without a weight.

        Source: Zhang and Sennrich 2019, eq. 4.
        """
        if weight is None:
            return x
        if x.is_cuda and weight.dtype == x.dtype:
            shape = (x.shape[-1],)
            if weight.dim() == 1:
                return F.rms_norm(x, shape, weight, self.spec.rms_eps)
            return F.rms_norm(x, shape, None, self.spec.rms_eps) * weight
        # on a CPU, F.rms_norm needs twice as many operations
        root_mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        root_mean = root_mean.mul_(x.shape[-1] ** -0.5).hypot_(self._root_eps)
        return (x / root_mean).mul_(weight).to(x.dtype)

    def _project(
        self, x: torch.Tensor, layer: LayerWeights, rotation: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Return queries, keys and values of one layer, [N, H + 2K, D].

        Queries and keys are normalized and rotated. A layer without a `rotation` has no norm for them either.
        """
        spec = self.spec
        qkv = layer.qkv(self._norm(x, layer.input_norm))
        qkv = qkv.view(x.shape[0], -1, spec.head_dim)
        if rotation is None:
            return qkv
        qk = qkv[:, : spec.qk_heads]
        if layer.qk_norm is not None:
            qk = self._norm_heads(qk, layer.qk_norm)
        cos, sin = rotation
        width, target = cos.shape[-1], qkv[:, : spec.qk_heads]
        if width < spec.head_dim:
            qk, target = qk[..., :width], target[..., :width]
        swapped = qk.roll(width // 2, -1)
        torch.addcmul(qk * cos, swapped, sin, out=target)
        return qkv

    def _norm_heads(self, qk: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.spec.qk_norm == "head":
            return self._norm(qk, weight)
        counts = [self.spec.num_heads, self.spec.num_kv_heads]
        weights = weight.split([count * self.spec.head_dim for count in counts])
        parts = zip(qk.split(counts, 1), weights, strict=True)
        return torch.cat([self._norm(part.flatten(1), w).view_as(part) for part, w in parts], 1)

    def _attend_causally(
        self, heads: torch.Tensor, chunk: Chunk, mask: torch.Tensor | None, kv: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention output [T, H x D] of one chunk, from `heads` [H + 2K, T, D].

        If the chunk does not start at position 0, earlier keys and values are read from the cache `kv`.
        """
        spec = self.spec
        if chunk.start:
            query, keys_values = heads[: spec.num_heads], kv[chunk.slot, :, : chunk.end]
        else:
            query, keys_values = heads.split([spec.num_heads, 2 * spec.num_kv_heads])
        keys, values = keys_values[None].chunk(2, 1)
        attended = F.scaled_dot_product_attention(
            query[None],
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=spec.attention_scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1).flatten(1)

    def _finish_layer(self, x: torch.Tensor, attended: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        scale = self.spec.residual_scale
        x = x.add(self._norm(layer.out(attended), layer.out_norm), alpha=scale)
        fed = self._feed_forward(self._norm(x, layer.mlp_norm), layer)
        return x.add(self._norm(fed, layer.down_norm), alpha=scale)

    def _feed_forward(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        activate = _ACTIVATIONS[self.spec.activation]
        if layer.gate_up is not None and layer.down is not None:
            gate, up = layer.gate_up(x).chunk(2, -1)
            return layer.down(activate(gate) * up)
        spec, experts = self.spec.experts, layer.experts
        assert spec is not None
        assert experts is not None
        weights, chosen = experts.router(x).float().softmax(-1).topk(spec.per_token)
        if spec.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, choices = (chosen == expert).nonzero(as_tuple=True)
            gate, up = experts.gate_up[expert](x[rows]).chunk(2, -1)
            fed = experts.down[expert](activate(gate) * up)
            mixed.index_add_(0, rows, fed * weights[rows, choices, None].to(x.dtype))
        return mixed


def _causal_mask(chunk: Chunk, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return the attention mask of a chunk, [tokens, end], or None if it is plainly causal.

    Each token attends to positions 0 up to its own, or to those in its window.
    """
    tokens, end = len(chunk.token_ids), chunk.end
    if window is None or window >= end:
        if not chunk.start:
            return None
        # CUDA has a fast kernel for this mask. Other devices skip the import: a second, and memory.
        if device.type == "cuda":
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(tokens, end)
        window = end
    mask = torch.ones(tokens, end, dtype=torch.bool, device=device)
    return mask.tril_(chunk.start).triu_(chunk.start - window + 1)
