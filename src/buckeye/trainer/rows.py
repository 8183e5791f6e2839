"""A bin of samples as the tensors that a forward pass and a loss need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from buckeye.errors import TransportError
from buckeye.trainer.layout import Layout, plan_row


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Samples laid out for one forward pass, prefixes that they share once.

    `token_ids` i64[tokens], `position_ids` i64[tokens], and the `layout` that tells attention which tokens
    see each other. `places` i64: where in the row each token of each sample is, sample after sample. For
    each of the N tokens that are trained, sample after sample: `sources` i64[N], the place of the hidden
    state that predicts it; `targets` i64[N], its id; `sequences` i64[N], the number of its sample.
    """

    token_ids: Tensor
    position_ids: Tensor
    layout: Layout
    places: Tensor
    sources: Tensor
    targets: Tensor
    sequences: Tensor


def make_row(
    token_ids: Sequence[npt.NDArray[np.int32]],
    loss_masks: Sequence[npt.NDArray[np.bool_]],
    device: torch.device,
    *,
    share: bool = True,
) -> Row:
    """Lay samples out in a row; without `share`, every one of them whole. `TransportError` if the first token
    of one, which nothing predicts, is to be trained."""
    if any(mask[0] for mask in loss_masks):
        raise TransportError("The loss mask of a sample includes its first token, which nothing predicts.")
    plan = plan_row(token_ids, device, share=share)
    trained = np.flatnonzero(np.concatenate(loss_masks))
    places = np.concatenate(plan.places)
    sequences = np.repeat(np.arange(len(token_ids)), [len(ids) for ids in token_ids])
    tensors = {
        "token_ids": plan.token_ids,
        "position_ids": plan.positions,
        "places": places,
        "sources": places[trained - 1],
        "targets": plan.token_ids[places[trained]],
        "sequences": sequences[trained],
    }
    return Row(layout=plan.layout, **{name: torch.from_numpy(t).to(device) for name, t in tensors.items()})
