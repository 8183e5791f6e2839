"""A bin of samples as the tensors that a forward pass and a loss need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from buckeye.errors import TransportError


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Samples end to end. `token_ids` i64[tokens]; `lengths` of the samples; and for each of the N tokens
    that are trained: `sources` i64[N], the place of the hidden state that predicts it; `targets` i64[N], its
    id; `sequences` i64[N], the number of its sample within the row."""

    token_ids: Tensor
    lengths: tuple[int, ...]
    sources: Tensor
    targets: Tensor
    sequences: Tensor


def make_row(
    token_ids: Sequence[npt.NDArray[np.int32]],
    loss_masks: Sequence[npt.NDArray[np.bool_]],
    device: torch.device,
) -> Row:
    """Lay samples out in a row. `TransportError` if the first token of one, which nothing predicts, is to be
    trained."""
    if any(mask[0] for mask in loss_masks):
        raise TransportError("The loss mask of a sample includes its first token, which nothing predicts.")
    lengths = [len(ids) for ids in token_ids]
    tokens = np.concatenate(token_ids).astype(np.int64)
    trained = np.flatnonzero(np.concatenate(loss_masks))
    sequences = np.repeat(np.arange(len(lengths)), lengths)[trained]
    return Row(
        token_ids=torch.from_numpy(tokens).to(device),
        lengths=tuple(lengths),
        sources=torch.from_numpy(trained - 1).to(device),
        targets=torch.from_numpy(tokens[trained]).to(device),
        sequences=torch.from_numpy(sequences).to(device),
    )
