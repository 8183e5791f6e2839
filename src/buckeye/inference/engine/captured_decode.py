"""Decode step on CUDA as one CUDA graph.

A graph contains the kernels of all layers for one number of sequences. Launching these kernels one by one
takes longer than running them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from buckeye.inference.engine import decode_kernels as kernels
from buckeye.inference.engine.architecture import ModelSpec
from buckeye.inference.engine.kv_cache import KVCache
from buckeye.inference.engine.weights import DecoderWeights, ModelWeights

_NO_SEQUENCE = -1


class CapturedDecode:
    """Decode step for CUDA that captures its graphs when they are first needed.

    A graph reads tokens, positions and weights at fixed addresses. When `DecoderWeights.moves` changes, all
    graphs are captured again. Triton's errors are raised if a kernel does not compile.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        cache: KVCache,
        tables: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._layers = cache.kv.unbind(0)
        self._slots = cache.slots
        self._tables = tables
        self._tokens = torch.zeros(cache.slots, dtype=torch.int64, device=cache.kv.device)
        self._positions = torch.full_like(self._tokens, _NO_SEQUENCE)
        kernels.gate(torch.zeros(1, 2, dtype=cache.kv.dtype, device=cache.kv.device))
        self._pool = torch.cuda.graph_pool_handle()
        self._moves = weights.moves
        self._logits = torch.empty(cache.slots, spec.vocab_size, device=cache.kv.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [B, vocab], of tokens [B] at positions [B] in slots 0..B-1.

        The next call overwrites the returned logits.
        """
        count = len(tokens)
        rows = min(rounded_up(count), self._slots)
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._positions[count:rows] = _NO_SEQUENCE
        if self._moves != self._weights.moves:
            self._graphs.clear()
            self._moves = self._weights.moves
        if rows not in self._graphs:
            self._graphs[rows] = self._capture(rows)
        self._graphs[rows].replay()
        return self._logits[:count]

    def _capture(self, rows: int) -> torch.cuda.CUDAGraph:
        self._step(rows)  # the first run compiles kernels, and libraries select their kernels
        graph = torch.cuda.CUDAGraph()
        # other threads may prepare new weights meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(rows)
        return graph

    def _step(self, rows: int) -> None:
        tokens, positions = self._tokens[:rows], self._positions[:rows]
        weights = self._weights.current
        logits = decode_step(self._spec, weights, self._layers, self._tables, tokens, positions)
        self._logits[:rows].copy_(logits)


def rounded_up(count: int) -> int:
    """Round a number of sequences up, so that few graphs are needed.

    The result is a multiple of an eighth of the next power of two. For example, 35 becomes 40.
    """
    step = max(1, 2 ** (count - 1).bit_length() // 8)
    return -(-count // step) * step


def decode_step(
    spec: ModelSpec,
    weights: ModelWeights,
    caches: tuple[torch.Tensor, ...],
    tables: tuple[torch.Tensor, torch.Tensor],
    tokens: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Return logits [B, vocab] of tokens [B] at positions [B].

    Row i reads slot i of each layer's cache, and adds the key and value of its token. A row with position -1
    has no sequence.
    """
    layers, eps = weights.layers, spec.rms_eps
    x = F.embedding(tokens, weights.embed)
    next_norms = [*(layer.input_norm for layer in layers[1:]), weights.final_norm]
    _, normed = kernels.add_and_norm(x, None, layers[0].input_norm, eps)
    for layer, kv, next_norm in zip(layers, caches, next_norms, strict=True):
        queries = kernels.rotate_and_store(
            layer.qkv(normed), layer.qk_norm, tables, positions, kv, heads=spec.num_heads, epsilon=eps
        )
        attended = kernels.attend(queries, kv, positions)
        x, normed = kernels.add_and_norm(x, layer.out(attended), layer.mlp_norm, eps)
        assert layer.gate_up is not None
        assert layer.down is not None
        fed = layer.down(kernels.gate(layer.gate_up(normed)))
        x, normed = kernels.add_and_norm(x, fed, next_norm, eps)
    return weights.head(normed)
