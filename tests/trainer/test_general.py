"""Models that transformers computes: bins of padded rows, and refusals."""

import numpy as np
import pytest
import torch

from buckeye.errors import UsageError
from buckeye.trainer.data.packing import plan_bins
from buckeye.trainer.model.policy import load_policy
from tests.general_models import tiny_model

CPU = torch.device("cpu")


def test_padded_bins_have_every_sample_once_and_fit():
    samples = [np.zeros(n, np.int32) for n in (5, 9, 3, 9, 1, 7)]
    bins = plan_bins(samples, 20, padded=True)
    assert sorted(i for b in bins for i in b.indices) == list(range(len(samples)))
    assert [b.tokens for b in bins] == [
        max(len(samples[i]) for i in b.indices) * len(b.indices) for b in bins
    ]
    assert max(b.tokens for b in bins) <= 20


def test_model_without_causal_attention_is_refused(tmp_path):
    tiny_model("bert", is_decoder=True).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), CPU)
    assert policy.padded
    tiny_model("bert").save_pretrained(tmp_path / "encoder")
    with pytest.raises(UsageError, match="encoder"):
        load_policy(str(tmp_path / "encoder"), CPU)


def test_general_model_cannot_be_sharded(tmp_path):
    tiny_model("bloom").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="cannot be sharded"):
        load_policy(str(tmp_path), CPU, sharded=True)
