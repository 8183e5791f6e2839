"""The engine computes what transformers computes."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from buckeye.errors import InferenceError
from buckeye.inference.engine.sequences import Sequence
from buckeye.inference.engine.weights import Checkpoint
from buckeye.inference.types import SamplingParams

from .conftest import VOCAB, finish, make_engine, near

FAMILIES = ["qwen3", "qwen2", "llama", "llama3", "llama-linear"]


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for n in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_generate(make_model, family):
    model = make_model(family)
    sequences = [
        Sequence(p, SamplingParams(max_tokens=40, temperature=0.0)) for p in prompts(1, 2, 9, 33, 70, 17)
    ]
    finish(make_engine(model.directory), *sequences)
    distinct = set()
    for s in sequences:
        ids = torch.tensor([s.prompt_ids])
        expected = model.reference.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)
        assert s.token_ids == expected[0, len(s.prompt_ids) :].tolist()
        distinct |= set(s.token_ids)
    assert len(distinct) > 40  # a model that repeats itself would prove little


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_teacher_forcing(make_model, family):
    model = make_model(family)
    sequences = [
        Sequence(p, SamplingParams(max_tokens=30, seed=i)) for i, p in enumerate(prompts(1, 5, 40, 64))
    ]
    finish(make_engine(model.directory), *sequences)
    for s in sequences:
        assert torch.tensor(s.logprobs) == near(model.logprobs(s.prompt_ids, s.token_ids))


def test_logprobs_are_of_the_distribution_sampled_from(qwen3):
    params = SamplingParams(max_tokens=25, temperature=0.7, top_p=0.8, top_k=12, seed=3)
    (prompt,) = prompts(8)
    sequence = Sequence(prompt, params)
    finish(make_engine(qwen3.directory), sequence)
    scaled = (qwen3.next_logprobs(prompt, sequence.token_ids) / 0.7).softmax(-1)
    for row, token, logprob in zip(scaled, sequence.token_ids, sequence.logprobs, strict=True):
        top = row.topk(12)
        share = top.values / top.values.sum()
        kept = int((share.cumsum(0) - share < 0.8).sum())
        nucleus = top.indices[:kept].tolist()
        assert token in nucleus
        expected = (row[token] / row[nucleus].sum()).log().item()
        assert logprob == near(expected)


def test_a_sharded_checkpoint_is_the_same_model(qwen3, tmp_path):
    qwen3.reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    one, other = (Sequence((1, 2, 3), SamplingParams(max_tokens=10)) for _ in range(2))
    finish(make_engine(qwen3.directory), one)
    finish(make_engine(tmp_path), other)
    assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def test_bfloat16_stays_close(qwen3):
    engine = make_engine(qwen3.directory, dtype=torch.bfloat16)
    (prompt,) = prompts(12)
    sequence = Sequence(prompt, SamplingParams(max_tokens=20, seed=1))
    finish(engine, sequence)
    error = (torch.tensor(sequence.logprobs) - qwen3.logprobs(prompt, sequence.token_ids)).abs()
    assert error.mean() < 0.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing tensors: model.norm.weight"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}), "unknown tensors"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(4)}), "wrong shapes"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(qwen3, tmp_path, change, message):
    shutil.copy(qwen3.directory / "config.json", tmp_path)
    tensors = load_file(qwen3.directory / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InferenceError, match=message):
        make_engine(tmp_path)


def test_a_directory_without_safetensors_is_refused(qwen3, tmp_path):
    shutil.copy(qwen3.directory / "config.json", tmp_path)
    with pytest.raises(InferenceError, match=r"no model\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_logprobs_equal_teacher_forcing(make_model, family):
    model = make_model(family)
    engine = make_engine(model.directory)
    for prompt in prompts(2, 40, 100):
        scored = engine.prompt_logprobs(prompt)
        engine.step()
        assert torch.tensor(scored.result()) == near(model.logprobs(prompt[:1], prompt[1:]))
