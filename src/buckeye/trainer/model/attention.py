"""Attention over a packed row of samples. transformers calls it by the name `buckeye_packed`.

On CUDA, one call of variable-length flash attention computes the whole row. On other devices, or without
flash attention, each block of the layout is a padded batch for `scaled_dot_product_attention`. On a CPU in
bfloat16, this function has no fast backward pass for short segments, so these use batched matrix products.
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
SHORT_KEYS = 256  # with more keys, a mask of all scores needs too much memory


def _varlen_arguments() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


# Older versions of torch do not have `varlen_attn`, or its argument `window_size`. Versions without the
# argument `enable_gqa` always accept fewer key heads than query heads.
_VARLEN_ARGUMENTS = _varlen_arguments()
_GQA_ARGUMENTS = {"enable_gqa": True} if "enable_gqa" in _VARLEN_ARGUMENTS else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Neighboring segments of similar length. Attention computes them as one batch [segments, length].

    The tokens of the segments are the tokens `start` to `end` - 1 of the row. `gather` i64[segments * length]
    has the index of the token at each padded position, counted from `start`. Padding contains following
    tokens, and no real token attends to it. `scatter` i64[end - start] is the inverse of `gather`. Both are
    None if all segments are equally long.

    A suffix also attends to its prefix, which is in the block with index `prefix_block`. `prefix_rows`
    i64[segments] has the index of the prefix in that block, and `prefix_lengths` i64[segments] its length.
    `common_prefix` is the length of the prefixes if they are equally long, else None. With more than
    `SHORT_KEYS` keys, they must be equally long.
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
        """Return the mask to add to the scores: 0 where a token attends to a key, else -inf.

        The shape is [1 or segments, length, keys]. The keys of the prefixes are first. The last `length` keys
        are those of the segments.
        """
        key = (keys, window, dtype)
        if key not in self.masks:
            self.masks[key] = _make_mask(self, keys, window, dtype, device)
        return self.masks[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Blocks of a row for padded attention, and index tensors for variable-length attention.

    The tokens of segment i are `query_ends[i]` to `query_ends[i + 1]` - 1 of the row. `keys` i64 has the row
    indices of the keys, segment after segment; None if the keys are the whole row. The keys of segment i are
    `key_ends[i]` to `key_ends[i + 1]` - 1 of `keys`. Both ends are i32[segments + 1].
    """

    blocks: tuple[Block, ...]
    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_keys: int
    keys: Tensor | None


def flash_available(device: torch.device) -> bool:
    """Return True if torch has variable-length flash attention for this device: NVIDIA GPUs since Ampere."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and "window_size" in _VARLEN_ARGUMENTS
    )


def detect_attention() -> str:
    """Return the name of the attention that a trainer on this machine uses by default.

    Buckeye uses the flash attention of torch, and not the package flash-attn.
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
    """Return causal attention within each sample, [1, tokens, heads, dim]. transformers calls this function.

    `query` is [1, heads, tokens, dim]. `key` and `value` are [1, key-value heads, tokens, dim]. With a
    `sliding_window`, a token attends to itself and the window - 1 tokens before it. `flash` selects the
    variable-length kernel of CUDA.
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


@torch.compiler.disable  # torch would compile a version for each layout
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
                repeat_rows(rows[:, : block.common_prefix], block.prefix_rows)
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

    `own` has the queries, keys and values of the segments, [segments, length, (key-value) heads, dim].
    `prefixes` has the queries, keys and values of the prefix of each segment.
    """
    query, key, value = own
    keys = block.length if prefixes is None else block.length + prefixes[1].shape[1]
    short = keys <= SHORT_KEYS
    # above SHORT_KEYS no mask hides the padding of prefixes, so they must be equally long
    assert prefixes is None or short or block.common_prefix is not None
    if prefixes is not None:
        key, value = torch.cat([prefixes[1], key], 1), torch.cat([prefixes[2], value], 1)
        # With the queries of the prefix, plain causal attention computes the result without a mask.
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


def repeat_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return `rows[index]`. Gradients of a repeated row are added in float32, on CUDA in a fixed order."""
    repeated: Tensor = _Repeat.apply(rows, index)
    return repeated


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = rows.shape
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _add_rows(gradient, ctx.saved_tensors[0], ctx.shape, sort=gradient.device.type != "cpu"), None


def _add_rows(rows: Tensor, index: Tensor, shape: Sequence[int], *, sort: bool) -> Tensor:
    """Return zeros of `shape` with each row added at its index.

    On a CPU, `index_add_` adds in float32 and in order. On CUDA, it adds atomically, in any order, and rounds
    each sum to the dtype. `index_put_` sorts the rows by index there, and is given float32.
    """
    if not sort:
        return rows.new_zeros(shape).index_add_(0, index, rows)
    total = rows.new_zeros(shape, dtype=torch.float32)
    return total.index_put_((index,), rows.float(), accumulate=True).to(rows.dtype)


class _Pad(torch.autograd.Function):
    """Return `rows[gather]`. The gradient is `gradient[scatter]`, because padding has no gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        return rows.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):
    """Return `rows[scatter]`. The gradient of the padding is zero."""

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
        key, value = (repeat_rows(rows, layout.keys) for rows in (key, value))
    # The kernel aligns the last query of a segment with its last key. A window of (n, 0) is causal.
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
