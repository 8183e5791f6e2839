"""The random number generators of this process as tensors: torch's, numpy's and Python's."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Tensor]:
    """All that `set_random_state` needs, copied. Of CUDA it is the generator of `device`."""
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    version, words, gauss = random.getstate()
    states = {
        "cpu": torch.get_rng_state(),
        "numpy": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
        "numpy.rest": torch.tensor(
            [numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]], dtype=torch.float64
        ),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python.gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Take over what `random_state` returned, maybe on another kind of device."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" not in states:  # an earlier version kept torch's only
        return
    position, has_gauss, spare = states["numpy.rest"].tolist()
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": states["numpy"].numpy().astype(np.uint32), "pos": int(position)},
            "has_gauss": int(has_gauss),
            "gauss": spare,
        }
    )
    version, *words = states["python"].tolist()
    gauss = float(states["python.gauss"])
    random.setstate((version, tuple(words), None if math.isnan(gauss) else gauss))
