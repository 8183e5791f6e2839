"""An exported model is compared with the checkpoint in the same precision."""

import shutil

import pytest
import torch

from buckeye.trainer.model import policy as model
from buckeye.trainer.output.release import Passages, write_model


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_model_that_is_trained_in_bfloat16_is_exported(tmp_path, tiny_model, monkeypatch, dtype):
    monkeypatch.setattr(model, "auto_compute_dtype", lambda parameters, device: torch.bfloat16)
    shutil.copytree(tiny_model, tmp_path / "state" / "model")
    verified = write_model(tmp_path / "state", tmp_path / "out", dtype=dtype, passages=Passages())
    assert verified.dtype == (dtype or "float32")
    assert verified.divergence < (1e-3 if dtype else 1e-6)
