"""Models that transformers computes: bins of padded rows, and refusals."""

import numpy as np
import pytest
import torch

from buckeye.errors import UsageError
from buckeye.trainer.data.packing import plan_bins
from buckeye.trainer.model.policy import load_policy
from buckeye.trainer.output.checkpoint_export import ComparisonTexts, write_model
from buckeye.trainer.output.hf_directory import read_tokenizer_files
from buckeye.trainer.rl import run_trainer
from tests.general_models import tiny_model as tiny_general_model

from .rl_runs import put, records
from .trainer_config import trainer_config

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
    tiny_general_model("bert", is_decoder=True).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), CPU)
    assert policy.padded
    tiny_general_model("bert").save_pretrained(tmp_path / "encoder")
    with pytest.raises(UsageError, match="encoder"):
        load_policy(str(tmp_path / "encoder"), CPU)


def test_model_with_its_sizes_in_a_part_is_trained_and_exported(tmp_path, tiny_model, batches):
    part = tiny_general_model("persimmon", vocab_size=264).config.to_dict()
    tiny_general_model("fuyu", text_config=part).save_pretrained(tmp_path / "model")
    for name, content in read_tokenizer_files(str(tiny_model)).items():
        (tmp_path / "model" / name).write_bytes(content)
    run, state = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_1" / "trainer"
    put(run, batches[:1])
    run_trainer(trainer_config(tmp_path / "model", run, max_steps=1, ckpt={}))
    assert [record["step"] for record in records(run) if "loss" in record] == [0]
    verified = write_model(state, tmp_path / "out", dtype=None, passages=ComparisonTexts())
    assert (verified.tokens, verified.divergence) == (64, 0.0)


def test_general_model_cannot_be_sharded(tmp_path):
    tiny_general_model("bloom").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="cannot be sharded"):
        load_policy(str(tmp_path), CPU, sharded=True)
