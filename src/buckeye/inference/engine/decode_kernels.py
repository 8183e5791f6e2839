"""Triton kernels for all operations of a decode step on CUDA other than matrix products with weights.

PyTorch would launch twice as many kernels, and each would read and write intermediate results.

Letters in shapes: B sequences, H query heads, K key/value heads, D head_dim, T positions. Kernels compute in
float32 and round when they store. A position below 0 marks a row without a sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 64  # maximum positions of keys and values per iteration
_MIN_ROWS = 16  # minimum rows of a tensor-core matrix product
_MAX_SPLITS = 16
_SHARED_MEMORY = 96 * 2**10  # bytes, for a device other than CUDA
_PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def _rotate_and_store(
    qkv,
    weight,
    cos,
    sin,
    positions,
    queries,
    kv,
    slot_stride,
    head_stride,
    epsilon,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row)
    offset = tl.maximum(position, 0)
    d = tl.arange(0, WIDTH)
    inside = d < D
    swapped = (d + D // 2) % D
    source = qkv + (row * (H + 2 * K) + head) * D
    x = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
    if head < H + K:
        y = tl.load(source + swapped, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + epsilon)
            x = x * scale * tl.load(weight + head * D + d, mask=inside, other=0.0).to(tl.float32)
            y = y * scale * tl.load(weight + head * D + swapped, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + offset * D + d, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + offset * D + d, mask=inside, other=0.0).to(tl.float32)
        x = x * c + y * s
    if head < H:
        tl.store(queries + (row * H + head) * D + d, x, mask=inside)
    else:
        target = kv + row * slot_stride + (head - H) * head_stride + offset * D + d
        tl.store(target, x, mask=inside & (position >= 0))


def rotate_and_store(
    qkv: torch.Tensor,
    weight: torch.Tensor | None,
    tables: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    kv: torch.Tensor,
    *,
    heads: int,
    epsilon: float,
) -> torch.Tensor:
    """Normalize and rotate the queries and keys of `qkv` [B, (H + 2K) D], and store keys and values.

    `weight` [H + K, D] is the weight of the norm; None skips the norm. The keys and values of row i go into
    slot i of `kv` [slots, 2K, max_len, D]. Return the queries, [B, H, D].
    """
    count, key_values, head_dim = len(qkv), kv.shape[1] // 2, kv.shape[-1]
    queries = qkv.new_empty(count, heads, head_dim)
    _rotate_and_store[(count, heads + 2 * key_values)](
        qkv,
        weight if weight is not None else qkv,
        *tables,
        positions,
        queries,
        kv,
        kv.stride(0),
        kv.stride(1),
        epsilon,
        H=heads,
        K=key_values,
        D=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        NORM=weight is not None,
        num_warps=1,
    )
    return queries


@triton.jit
def _attend(
    queries,
    kv,
    positions,
    out,
    highest,
    totals,
    slot_stride,
    head_stride,
    scale,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    parts = tl.num_programs(2)
    length = tl.load(positions + row).to(tl.int32) + 1
    share = tl.cdiv(tl.cdiv(length, BLOCK), parts) * BLOCK
    start = part * share
    stop = tl.minimum(start + share, length)
    g = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    inside = (g < G) & (d < D)
    query = tl.load(queries + (row * K * G + head * G + g) * D + d, mask=inside, other=0.0)
    keys = kv + row * slot_stride + head * head_stride
    values = keys + K * head_stride
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(start, stop, BLOCK):
        t = first + tl.arange(0, BLOCK)
        seen = (t[:, None] < stop) & (d < D)
        offset = t[:, None].to(tl.int64) * D + d
        key = tl.load(keys + offset, mask=seen, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        scores = tl.where(t[None, :] < stop, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        before = tl.exp(best - higher)
        total = total * before + tl.sum(weights, 1)
        value = tl.load(values + offset, mask=seen, other=0.0)
        added = tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        weighted = weighted * before[:, None] + added
        best = higher
    heads = row * K * G + head * G + tl.arange(0, ROWS)
    if SPLIT:
        exists = tl.arange(0, ROWS) < G
        tl.store(highest + heads * parts + part, best, mask=exists)
        tl.store(totals + heads * parts + part, total, mask=exists)
        tl.store(out + (heads[:, None] * parts + part) * D + d, weighted, mask=inside)
    else:
        weighted = weighted / tl.maximum(total, 1e-30)[:, None]
        tl.store(out + heads[:, None] * D + d, weighted, mask=inside)


@triton.jit
def _combine(
    part_sums, highest, totals, out, parts, D: tl.constexpr, WIDTH: tl.constexpr, MAX_SPLITS: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, MAX_SPLITS)
    d = tl.arange(0, WIDTH)
    best = tl.load(highest + head * parts + p, mask=p < parts, other=float("-inf"))
    top = tl.maximum(tl.max(best, 0), -1e30)  # a row without a sequence has only -inf
    weights = tl.exp(best - top)
    total = tl.load(totals + head * parts + p, mask=p < parts, other=0.0)
    present = (p[:, None] < parts) & (d[None, :] < D)
    weighted = tl.load(part_sums + (head * parts + p[:, None]) * D + d[None, :], mask=present, other=0.0)
    weighted = tl.sum(weighted * weights[:, None], 0) / tl.maximum(tl.sum(total * weights, 0), 1e-30)
    tl.store(out + head * D + d, weighted, mask=d < D)


def attend(queries: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the attention output [B, H D] of one token per row.

    Row i of `queries` [B, H, D] attends to the positions 0 to `positions[i]` in slot i of `kv` [slots, 2K,
    max_len, D]. With few rows, several programs share the positions of a row, so that every multiprocessor
    has work (flash-decoding).
    """
    count, heads, head_dim = queries.shape
    key_values = kv.shape[1] // 2
    parts = _parts(count * key_values, kv.shape[2], queries.device)
    out = torch.empty_like(queries)
    weighted, highest, totals = out, out, out
    if parts > 1:
        weighted = queries.new_empty(count, heads, parts, head_dim, dtype=torch.float32)
        highest, totals = queries.new_empty(2, count, heads, parts, dtype=torch.float32)
    width = triton.next_power_of_2(head_dim)
    group = heads // key_values
    block, stages = _tile(width * kv.element_size(), queries.device)
    _attend[(count, key_values, parts)](
        queries,
        kv,
        positions,
        weighted,
        highest,
        totals,
        kv.stride(0),
        kv.stride(1),
        head_dim**-0.5,
        K=key_values,
        G=group,
        D=head_dim,
        ROWS=max(_MIN_ROWS, triton.next_power_of_2(group)),
        WIDTH=width,
        BLOCK=block,
        SPLIT=parts > 1,
        PRECISION="tf32" if kv.element_size() == 2 else "ieee",
        num_warps=4,
        num_stages=stages,
    )
    if parts > 1:
        _combine[(count * heads,)](
            weighted,
            highest,
            totals,
            out,
            parts,
            D=head_dim,
            WIDTH=width,
            MAX_SPLITS=_MAX_SPLITS,
            num_warps=2,
        )
    return out.flatten(1)


def _tile(row_bytes: int, device: torch.device) -> tuple[int, int]:
    """Return the number of positions per read, and the number of reads in flight.

    The keys and values of all reads in flight fit into a multiprocessor's shared memory.
    """
    shared = _SHARED_MEMORY
    if device.type == "cuda":
        shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    for block, stages in ((_BLOCK, 3), (_BLOCK, 2), (_BLOCK // 2, 2)):
        if 2 * stages * block * row_bytes < 0.9 * shared:
            return block, stages
    return _BLOCK // 4, 2


def _parts(programs: int, positions: int, device: torch.device) -> int:
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    )
    parts = _PROGRAMS_PER_PROCESSOR * processors // programs
    return max(1, min(parts, _MAX_SPLITS, positions // (2 * _BLOCK)))


@triton.jit
def _add_and_norm(
    x, added, weight, total, normed, epsilon, N: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, WIDTH)
    inside = n < N
    value = tl.load(x + row * N + n, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(added + row * N + n, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + row * N + n, value, mask=inside)
        value = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / N + epsilon)
    factor = tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * N + n, value * scale * factor, mask=inside)


def add_and_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return s = x + added, and s / sqrt(mean(s^2) + eps) * weight; [B, hidden] each."""
    total = torch.empty_like(x) if added is not None else x
    normed = torch.empty_like(x)
    size = x.shape[-1]
    _add_and_norm[(len(x),)](
        x,
        added if added is not None else x,
        weight,
        total,
        normed,
        epsilon,
        N=size,
        WIDTH=triton.next_power_of_2(size),
        ADD=added is not None,
        num_warps=4 if size <= 4096 else 8,
    )
    return total, normed


@triton.jit
def _gate(gate_up, out, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    gate = tl.load(gate_up + row * 2 * N + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of [B, 2 mlp_size]."""
    count, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(count, size)
    _gate[(count, triton.cdiv(size, 1024))](gate_up, out, size, BLOCK=1024, num_warps=4)
    return out
