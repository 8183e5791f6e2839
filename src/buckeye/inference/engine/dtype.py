"""The one rule by which the engine and the trainer choose what to compute in."""

from __future__ import annotations

import torch

_BFLOAT16_PARAMETERS = 5_000_000


def auto_compute_dtype(parameters: int, device: torch.device) -> torch.dtype:
    """What to compute in where nothing is asked for: bfloat16 on a GPU; on a CPU float32, in which engine and
    trainer agree to the last digits, unless the model is large and the processor multiplies in bfloat16."""
    if device.type != "cpu":
        return torch.bfloat16
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast and parameters >= _BFLOAT16_PARAMETERS else torch.float32
