"""Attention over a packed row of samples, registered with transformers as `buckeye_packed`.

On CUDA the whole row is one variable-length flash-attention call. Elsewhere each block of the layout is a
padded batch for `scaled_dot_product_attention`. On a CPU in bfloat16, short segments use batched matrix
products instead: torch's kernel has no fast backward pass for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from buckeye.trainer.model.segment_attention import short_attention

PACKED_ATTENTION = "buckeye_packed"
SHORT_KEYS = 256  # with more keys than this, masks of all scores are too large


def _varlen_arguments() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


# Older versions of torch lack this function, or its window argument. Some versions accept groups of query
# heads without `enable_gqa`.
_VARLEN_ARGUMENTS = _varlen_arguments()
_GQA_ARGUMENTS = {"enable_gqa": True} if "enable_gqa" in _VARLEN_ARGUMENTS else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Neighboring segments of similar length: tokens `start` to `end` of the row as [segments, length].

    `gather` i64[segments * length] has, for each padded position, the index of its token among `start` to
    `end`. Padding repeats the last token, and no real token sees it. `scatter` i64[end - start] is the
    inverse. Both are None if all segments are equally long.

    Suffixes also see their prefixes. These are in the block with index `prefix_block`; `prefix_rows`
    i64[segments] has the position in that block, and `prefix_lengths` i64[segments] the length.
    `common_prefix` is the length of all prefixes if they are equally long, which is required above
    `SHORT_KEYS` keys.
    """

    start: int
    end: int
    segments: int
    length: int
    gather: Tensor | None
    scatter: Tensor | None
    prefix_block: int | None = None
    prefix_rows: Tensor | None = None
    prefix_lengths: Tensor | None = None
    common_prefix: int | None = None
    masks: dict[tuple[int, int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the mask to add to the scores: 0 where a token sees a key, else -inf.

        Shape [1 or segments, length, keys]. The first keys are those of the prefixes, the last `length` keys
        those of the segments.
        """
        key = (keys, window, dtype)
        if key not in self.masks:
            self.masks[key] = _make_mask(self, keys, window, dtype, device)
        return self.masks[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Blocks of a row, and its layout for kernels that take segments of any length.

    `query_ends` i32[segments + 1] are the ends of the segments' tokens in the row. `keys` i64 has the row
    indices of the keys, segment after segment; None if they are the whole row. `key_ends` i32[segments + 1]
    are the ends of the segments in `keys`.
    """

    blocks: tuple[Block, ...]
    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_keys: int
    keys: Tensor | None


def flash_available(device: torch.device) -> bool:
    """Return True if torch has variable-length flash attention for this device (NVIDIA GPUs since Ampere)."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and "window_size" in _VARLEN_ARGUMENTS
    )


def detect_attention() -> str:
    """Return the attention that a trainer on this machine uses, unless a setting asks for SDPA.

    The package flash-attn is never imported: the kernels are those in torch.
    """
    if not torch.cuda.is_available():
        return "SDPA (no GPU)"
    device = torch.device("cuda")
    if flash_available(device):
        return f"flash attention of torch {torch.__version__}"
    return f"SDPA (torch {torch.__version__} has no flash attention for {torch.cuda.get_device_name(device)})"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    flash: bool = False,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sample, with the signature that transformers expects.

    `query` [1, heads, tokens, dim]; `key`, `value` [1, key-value heads, tokens, dim]; returns [1, tokens,
    heads, dim]. With a `sliding_window` a token sees itself and the window - 1 tokens before it. `flash`
    selects CUDA's variable-length kernel.
    """
    q, k, v = (t[0].transpose(0, 1).to(value.dtype) for t in (query, key, value))  # [tokens, heads, dim]
    if flash:
        return _attend_varlen(q, k, v, layout, scaling, sliding_window)[None], None
    return _attend_in_blocks(q, k, v, layout, scaling or q.shape[-1] ** -0.5, dropout, sliding_window)[
        None
    ], None


def _make_mask(
    block: Block, keys: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    offsets = torch.arange(block.length, device=device)
    prefix_keys = keys - block.length
    lengths = torch.zeros(1, dtype=torch.int64, device=device)
    if block.prefix_lengths is not None:
        lengths = block.prefix_lengths
        if block.common_prefix is not None:
            lengths = lengths[:1]
    positions = torch.arange(prefix_keys, device=device).expand(len(lengths), prefix_keys)
    is_padding = positions >= lengths[:, None]
    query_positions = lengths[:, None] + offsets
    positions = torch.cat([positions, query_positions], dim=1)
    distance = query_positions[:, :, None] - positions[:, None]
    hidden = distance < 0
    hidden[:, :, :prefix_keys] |= is_padding[:, None]
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


@torch.compiler.disable  # each layout would be compiled separately
def _attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scaling: float,
    dropout: float,
    window: int | None,
) -> Tensor:
    outputs = []
    padded: list[list[Tensor]] = []
    for block in layout.blocks:
        own = [_pad(rows[block.start : block.end], block) for rows in (query, key, value)]
        padded.append(own)
        prefixes = None
        if block.prefix_block is not None and block.prefix_rows is not None:
            prefixes = [
                rows[:, : block.common_prefix].index_select(0, block.prefix_rows)
                for rows in padded[block.prefix_block]
            ]
        attended = _attend_block(own, prefixes, block, scaling, dropout, window).flatten(0, 1)
        outputs.append(attended if block.scatter is None else _Unpad.apply(attended, block.scatter))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_block(
    own: Sequence[Tensor],
    prefixes: Sequence[Tensor] | None,
    block: Block,
    scaling: float,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Return the attention output [segments, length, heads, dim].

    `own` are queries, keys and values of the segments, [segments, length, (key-value) heads, dim]. `prefixes`
    are the queries, keys and values of the prefixes.
    """
    query, key, value = own
    keys = block.length if prefixes is None else block.length + prefixes[1].shape[1]
    short = keys <= SHORT_KEYS
    # above SHORT_KEYS no mask hides the padding of prefixes, so they must be equally long
    assert prefixes is None or short or block.common_prefix is not None
    if prefixes is not None:
        key, value = torch.cat([prefixes[1], key], 1), torch.cat([prefixes[2], value], 1)
        # with the queries of the prefix the attention is causal, and needs no mask
        if not short:
            query = torch.cat([prefixes[0], query], 1)
    if short and query.device.type == "cpu" and query.dtype == torch.bfloat16 and not dropout:
        mask = block.mask(keys, window, torch.float32, query.device)
        return short_attention(query, key, value, mask, scaling)
    causal = keys == query.shape[1] and (window is None or keys <= window)
    mask = None if causal else block.mask(keys, window, query.dtype, query.device)[:, None]
    output = functional.scaled_dot_product_attention(
        query[:, -block.length :].transpose(1, 2) if mask is not None else query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return output.transpose(1, 2)[:, -block.length :]


def _pad(rows: Tensor, block: Block) -> Tensor:
    if block.gather is not None and block.scatter is not None:
        rows = _Pad.apply(rows, block.gather, block.scatter)
    return rows.view(block.segments, block.length, *rows.shape[1:])


class _Pad(torch.autograd.Function):
    """`rows[gather]` with the gradient `gradient[scatter]`.

    Padding has no gradient, since no real token sees it.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        return rows.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):
    """`rows[scatter]` with a zero gradient for the padding."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        ctx.shape = rows.shape
        return rows.index_select(0, scatter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.shape).index_copy_(0, ctx.saved_tensors[0], gradient), None


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if layout.keys is not None:
        key, value = (rows.index_select(0, layout.keys) for rows in (key, value))
    # causal within the window; the last query of a segment is aligned with its last key
    return varlen_attn(
        query,
        key,
        value,
        layout.query_ends,
        layout.key_ends,
        layout.longest_query,
        layout.longest_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **_GQA_ARGUMENTS if query.shape[1] != key.shape[1] else {},
    )


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
