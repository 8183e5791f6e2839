"""Losses in the trainer process: rows, reference models, custom functions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3MoeConfig

from buckeye.errors import UsageError
from buckeye.trainer.rl import run_trainer
from tests.inference.conftest import make_engine
from tests.trainer.rl_runs import put, records
from tests.trainer.trainer_config import trainer_config

SEQUENCE_MASK = {"type": "mask", "level": "sequence", "low": 0.5, "high": 2.0}
LOSSES = [
    {"type": "masked_ratio", "entropy_coef": 0.01},
    {"type": "gspo", "clip_low": 0.05, "clip_high": 0.05, "correction": SEQUENCE_MASK},
    {"type": "dr_grpo", "normalization_length": 64, "kl_coef": 0.1},
    {"type": "decoupled_ppo", "kl_coef": 0.1, "kl_estimator": "k3_weighted", "entropy_coef": 0.01},
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["type"])
def test_loss_is_independent_of_packing(tmp_path, tiny_model, batches, loss):
    found = []
    for seq_len in (40, 1000):
        put(tmp_path / str(seq_len), batches[:1])
        config = trainer_config(tiny_model, tmp_path / str(seq_len), seq_len=seq_len, max_steps=1, loss=loss)
        run_trainer(config)
        found.append(records(tmp_path / str(seq_len))[0])
    prefixes = (
        "loss",
        "grad_norm",
        "entropy",
        "mismatch",
        "ratio",
        "effective",
        "reference",
        "masked",
        "clipped",
        "corrected",
    )
    numbers = [{k: v for k, v in record.items() if k.startswith(prefixes)} for record in found]
    assert len(numbers[0]) > 9
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1e-6)
    assert numbers[0]["grad_norm"] > 0


EVERY_SAMPLE = [{"type": "ppo", "kl_coef": 0.1}, {"type": "reinforce", "entropy_coef": 0.1}]


def written(sample, version, **changes):
    return replace(sample, versions=np.where(sample.loss_mask, version, -1).astype(np.int32), **changes)


def test_batch_statistics_are_independent_of_the_loss(tmp_path, train, batches):
    """The second batch has samples of the current and of the previous version.

    One sample of the previous version has zero advantages: not every loss computes it.
    """
    fresh, old, idle = batches[1].samples[:3]
    without = np.zeros_like(idle.advantages)
    samples = (written(fresh, 1), written(old, 0), written(idle, 0, advantages=without))
    found = []
    for number, loss in enumerate([{"type": "masked_ratio"}, *EVERY_SAMPLE]):
        output = tmp_path / str(number)
        still = {"optim": {"lr": 1e-12}, "max_steps": 2, "loss": loss}
        train(output, [batches[0], replace(batches[1], samples=samples)], **still)
        found.append(records(output)[1])
    names = ("entropy", "mismatch_kl", "ratio", "effective", "staleness", "zero_advantage_share")
    first, *others = ({k: v for k, v in record.items() if k.startswith(names)} for record in found)
    assert {"entropy_fresh", "mismatch_kl_fresh"} < first.keys()
    for other in others:
        assert other == pytest.approx(first, rel=1e-5, abs=1e-7)
    tokens = [int(sample.loss_mask.sum()) for sample in samples]
    share = tokens[1] / (tokens[0] + tokens[1])
    assert (first["staleness_mean"], first["staleness_share_1"]) == (share, share)
    assert [record["trained_tokens"] for record in found] == [sum(tokens[:2]), *[sum(tokens)] * 2]


@pytest.mark.parametrize("lora", [None, {"rank": 4, "target_modules": ["q_proj", "down_proj"]}])
def test_default_reference_is_the_initial_model(tmp_path, tiny_model, batches, lora):
    put(tmp_path, batches[:2])
    config = trainer_config(
        tiny_model,
        tmp_path,
        max_steps=2,
        loss={"type": "ppo", "kl_coef": 0.1},
        model={"experimental": {"lora": lora}},
    )
    run_trainer(config)
    first, second = (r["reference_kl"] for r in records(tmp_path))
    assert first == pytest.approx(0, abs=1e-6)
    assert second > 1e-4


def test_reference_model_setting_is_used(tmp_path, train, tiny_llama, batches):
    loss = {"kl_coef": 0.1, "reference_model": str(tiny_llama)}
    train(tmp_path, batches[:1], loss=loss)
    assert records(tmp_path)[0]["reference_kl"] > 0.01


def test_reference_with_another_vocabulary_is_refused(tmp_path, tiny_model, build_model, refusal):
    other = build_model(Qwen3Config, vocab_size=300)
    config = trainer_config(tiny_model, tmp_path, loss={"kl_coef": 0.1, "reference_model": str(other)})
    with refusal(UsageError):
        run_trainer(config)


def test_invalid_custom_loss_is_refused_before_the_model_is_loaded(tmp_path, refusal):
    loss = {"type": "custom", "import_path": "no_such_module:loss"}
    with refusal(UsageError):
        run_trainer(trainer_config(tmp_path / "no-model", tmp_path, loss=loss))


@pytest.fixture
def near_ties(build_model):
    """Two models whose routers differ by 1e-5, so that half of the experts' choices do, and nothing else."""
    models = []
    for sign in (1, -1):
        folder = build_model(
            Qwen3MoeConfig,
            num_experts=4,
            num_experts_per_tok=1,
            norm_topk_prob=True,
            moe_intermediate_size=24,
        )
        tensors = load_file(folder / "model.safetensors")
        generator = torch.Generator().manual_seed(0)
        for name, values in tensors.items():
            if name.endswith("mlp.gate.weight"):
                noise = torch.randn(values[::2].shape, generator=generator)
                values[1::2] = values[::2] + sign * 1e-5 * noise
            elif ".experts." in name:
                values *= 10
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        models.append(folder)
    return models


def test_mismatch_shows_tokens_with_other_experts(tmp_path, near_ties, batches):
    """The engine computed the same model, or one that chooses other experts where two are nearly equal."""
    found = []
    for number, engine in enumerate(near_ties):
        decoder = make_engine(engine).decoder
        samples = [
            replace(sample, logprobs=np.float32([0, *decoder.prompt_logprobs(sample.token_ids.tolist())]))
            for sample in batches[0].samples
        ]
        output = tmp_path / str(number)
        put(output, [replace(batches[0], samples=tuple(samples))])
        run_trainer(trainer_config(near_ties[0], output, max_steps=1))
        found.append(records(output)[0]["mismatch_kl_fresh"])
    same, other = found
    assert same < 1e-6
    assert other > 1e-3, other
