"""Forward pass: prefill of prompts into the cache, and one decode step for all running sequences."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from buckeye.inference.engine.architecture import ModelSpec
from buckeye.inference.engine.kv_cache import KVCache
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
        self._cos, self._sin = rotation_tables(
            spec.rope, spec.head_dim, cache.max_len, dtype=kv.dtype, device=kv.device
        )
        self._positions = torch.arange(cache.max_len, device=kv.device)
        self._slots = torch.arange(cache.slots, device=kv.device)
        self._caches = kv.unbind(0)
        self._root_eps = torch.tensor(math.sqrt(spec.rms_eps), device=kv.device)
        self._views: tuple[tuple[int, int], list[_LayerCache]] = ((0, 0), [])
        self._captured = self._captured_decode() if kv.is_cuda else None

    def _captured_decode(self) -> DecodeStep | None:
        """Return the decode step that runs as one CUDA graph.

        Return None if Triton fails, or if the logits of this step differ from those of `_decode`.
        """
        try:
            from buckeye.inference.engine.captured_decode import CapturedDecode

            step = CapturedDecode(self.spec, self.weights, self.cache, (self._cos, self._sin))
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
        hidden_positions = self._positions[:length] > positions[:, None]
        mask = torch.zeros(count, length, dtype=self.cache.kv.dtype, device=self.device)
        mask = mask.masked_fill_(hidden_positions, float("-inf"))[:, None, None]
        x, cos, sin = self._embed(tokens, positions)
        weights = self.weights.current
        for layer, (kv, keys, values) in zip(weights.layers, self._cache_views(count, length), strict=True):
            qkv = self._project(x, layer, cos, sin)
            kv[rows, :, positions] = qkv[:, spec.num_heads :]
            # Pass the queries of a group as positions of their key head, so that the kernel reads keys once.
            query = qkv[:, : spec.num_heads].view(count, spec.num_kv_heads, -1, spec.head_dim)  # [B, K, G, D]
            attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            x = self._finish_layer(x, attended.reshape(count, -1), layer)
        return weights.head(self._norm(x, weights.final_norm)).float()

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Compute the keys and values of all chunks in one packed batch, and write them into the slots."""
        spec = self.spec
        lengths = [len(chunk.token_ids) for chunk in chunks]
        tokens = torch.cat([chunk.token_ids for chunk in chunks]).to(self.device)
        positions = torch.cat([self._positions[chunk.start : chunk.end] for chunk in chunks])
        x, cos, sin = self._embed(tokens, positions)
        masks = [_causal_mask(len(c.token_ids), c.end, self.device) if c.start else None for c in chunks]
        layers = self.weights.current.layers
        for layer, kv in zip(layers, self._caches, strict=True):
            qkv = self._project(x, layer, cos, sin)
            heads = [part.transpose(0, 1) for part in qkv.split(lengths)]  # [H + 2K, T, D] each
            for chunk, part in zip(chunks, heads, strict=True):
                kv[chunk.slot, :, chunk.start : chunk.end] = part[spec.num_heads :]
            if layer is layers[-1]:
                return  # the remaining operations only compute logits, which prefill does not need
            parts = zip(heads, chunks, masks, strict=True)
            attended = torch.cat([self._attend_causally(*part, kv) for part in parts])
            x = self._finish_layer(x, attended, layer)

    @torch.inference_mode()
    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token t | tokens before t) for all tokens but the first one, without the cache."""
        tokens = torch.tensor(token_ids, device=self.device)
        x, cos, sin = self._embed(tokens, self._positions[: len(tokens)])
        weights = self.weights.current
        for layer, kv in zip(weights.layers, self._caches, strict=True):
            heads = self._project(x, layer, cos, sin).transpose(0, 1)
            x = self._finish_layer(x, self._attend_causally(heads, Chunk(0, tokens, 0), None, kv), layer)
        hidden = self._norm(x[:-1], weights.final_norm)
        found = [
            -F.cross_entropy(weights.head(part).float(), targets, reduction="none")
            for part, targets in zip(hidden.split(_SCORED_ROWS), tokens[1:].split(_SCORED_ROWS), strict=True)
        ]
        return [float(value) for part in found for value in part.cpu()]

    def _embed(
        self, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = F.embedding(tokens, self.weights.current.embed)
        return x, self._cos[positions][:, None], self._sin[positions][:, None]

    def _cache_views(self, count: int, length: int) -> list[_LayerCache]:
        """Return views of the first `length` positions of slots 0..count-1.

        The views are cached, because most steps need the views of the step before.
        """
        if self._views[0] != (count, length):
            views = [_LayerCache(kv, *kv[:count, :, :length].chunk(2, 1)) for kv in self._caches]
            self._views = ((count, length), views)
        return self._views[1]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

        Source: Zhang and Sennrich 2019, eq. 4.
        """
        if x.is_cuda:
            shape = (x.shape[-1],)
            if weight.dim() == 1:
                return F.rms_norm(x, shape, weight, self.spec.rms_eps)
            return F.rms_norm(x, shape, None, self.spec.rms_eps) * weight
        # on a CPU, F.rms_norm needs twice as many operations
        root_mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        root_mean = root_mean.mul_(x.shape[-1] ** -0.5).hypot_(self._root_eps)
        return (x / root_mean).mul_(weight).to(x.dtype)

    def _project(
        self, x: torch.Tensor, layer: LayerWeights, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Return queries, keys and values of one layer, [N, H + 2K, D].

        Queries and keys are normalized and rotated.
        """
        spec = self.spec
        qkv = layer.qkv(self._norm(x, layer.input_norm))
        qkv = qkv.view(x.shape[0], -1, spec.head_dim)
        qk = qkv[:, : spec.qk_heads]
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        swapped = qk.roll(spec.head_dim // 2, -1)
        torch.addcmul(qk * cos, swapped, sin, out=qkv[:, : spec.qk_heads])
        return qkv

    def _attend_causally(
        self, heads: torch.Tensor, chunk: Chunk, mask: torch.Tensor | None, kv: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention output [T, H x D] of one chunk, from `heads` [H + 2K, T, D].

        If the chunk does not start at position 0, earlier keys and values are read from the cache `kv`. Only
        such a chunk has a `mask`.
        """
        spec = self.spec
        if chunk.start:
            query, keys_values = heads[: spec.num_heads], kv[chunk.slot, :, : chunk.end]
        else:
            query, keys_values = heads.split([spec.num_heads, 2 * spec.num_kv_heads])
        keys, values = keys_values[None].chunk(2, 1)
        attended = F.scaled_dot_product_attention(
            query[None], keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return attended[0].transpose(0, 1).flatten(1)

    def _finish_layer(self, x: torch.Tensor, attended: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        x = x + layer.out(attended)
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
        return x + layer.down(F.silu(gate) * up)


def _causal_mask(tokens: int, end: int, device: torch.device) -> torch.Tensor:
    """Return the attention mask of the last `tokens` of `end` positions. Each attends to 0 up to itself."""
    # CUDA has a fast kernel for this mask. Other devices skip the import, which takes a second and memory.
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(tokens, end)
    return torch.ones(tokens, end, dtype=torch.bool, device=device).tril_(end - tokens)
