"""Attention over packed samples, registered with transformers as `buckeye_packed`.

A bin is one row of tokens in which several samples lie end to end. No token sees another sample's, and no
work is spent on the squares between them: neighbouring samples of similar length are padded to a small
[samples, length] batch for one causal `scaled_dot_product_attention` call each; on CUDA the whole row is one
variable-length flash-attention call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

PACKED_ATTENTION = "buckeye_packed"

_SHORTEST = 0.75  # of the longest in a group: at most 1 / 0.75^2 = 1.8 times the useful work


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Neighbouring samples of similar length: tokens `start` to `end` of the row as [samples, length].

    `gather` i64[samples * length] names for each padded place a token of the slice (padding repeats the last
    sample's end, which no real token sees); `scatter` i64[end - start] is the way back. Both are None if all
    samples are equally long.
    """

    start: int
    end: int
    samples: int
    length: int
    gather: Tensor | None
    scatter: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where the samples of a row lie. `position_ids` i64[1, tokens]; `boundaries` i32[samples + 1]."""

    groups: tuple[Group, ...]
    position_ids: Tensor
    boundaries: Tensor
    longest: int
    flash: bool


def make_layout(lengths: Sequence[int], device: torch.device, *, flash: bool = False) -> Layout:
    """The layout of a row of samples of these lengths. `flash` asks for CUDA's variable-length kernel."""
    groups = []
    start = 0
    for run in _similar_runs(lengths):
        groups.append(_group(run, start, device))
        start += sum(run)
    return Layout(
        groups=tuple(groups),
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None].to(device),
        boundaries=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
        longest=max(lengths),
        flash=flash,
    )


def _similar_runs(lengths: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for length in lengths:
        if runs and min(length, *runs[-1]) >= _SHORTEST * max(length, *runs[-1]):
            runs[-1].append(length)
        else:
            runs.append([length])
    return runs


def _group(run: Sequence[int], start: int, device: torch.device) -> Group:
    total, longest = sum(run), max(run)
    gather = scatter = None
    if longest * len(run) != total:
        begins = torch.tensor([0, *accumulate(run)])[:-1, None]
        places = torch.arange(longest)[None]
        real = places < torch.tensor(run)[:, None]
        gather = (begins + places).clamp_max(total - 1).flatten().to(device)
        scatter = real.flatten().nonzero().squeeze(1).to(device)
    return Group(
        start=start, end=start + total, samples=len(run), length=longest, gather=gather, scatter=scatter
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sample, in the form that transformers calls.

    `query` [1, heads, tokens, dim]; `key`, `value` [1, key-value heads, tokens, dim]; returns
    [1, tokens, heads, dim]. With a `sliding_window` a token sees itself and the window - 1 tokens before it.
    """
    q, k, v = (t[0].transpose(0, 1).to(value.dtype) for t in (query, key, value))  # [tokens, heads, dim]
    if layout.flash:
        return _flash(q, k, v, layout, scaling, sliding_window)[None], None
    return _grouped(q, k, v, layout, scaling, dropout, sliding_window)[None], None


@torch.compiler.disable  # every layout would be compiled anew
def _grouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> Tensor:
    outputs = [_one_group(query, key, value, g, scaling, dropout, sliding_window) for g in layout.groups]
    return torch.cat(outputs)


def _one_group(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> Tensor:
    def pad(rows: Tensor) -> Tensor:
        rows = rows[group.start : group.end]
        rows = rows if group.gather is None else rows.index_select(0, group.gather)
        return rows.view(group.samples, group.length, *rows.shape[1:]).transpose(1, 2)

    mask = None
    if sliding_window is not None and group.length > sliding_window:
        distance = torch.arange(group.length, device=query.device)
        distance = distance[:, None] - distance[None]
        mask = (distance >= 0) & (distance < sliding_window)
    output = functional.scaled_dot_product_attention(
        pad(query),
        pad(key),
        pad(value),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    rows = output.transpose(1, 2).reshape(group.samples * group.length, *query.shape[1:])
    return rows if group.scatter is None else rows.index_select(0, group.scatter)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    before = -1 if sliding_window is None else sliding_window - 1
    return varlen_attn(
        query,
        key,
        value,
        layout.boundaries,
        layout.boundaries,
        layout.longest,
        layout.longest,
        scale=scaling,
        window_size=(before, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
