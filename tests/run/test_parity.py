"""A trained model is the same model everywhere: in the engine, in the trainer, and in plain transformers."""

import asyncio
import os

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from buckeye.inference.client import InferenceClient, SamplingParams
from buckeye.inference.render import ChatRenderer
from buckeye.launch.serve import served_model
from buckeye.trainer.data.packing import pack_micro_batch
from buckeye.trainer.model.policy import load_policy
from buckeye.workers.opening import load_environment
from dakota1890.__main__ import main as write_demonstrations
from tests.command import run_here

pytestmark = pytest.mark.e2e
PROMPTS = 50


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that `buckeye model tiny` made and `sft` trained: sharp enough that greedy decoding is not
    noise."""
    root = tmp_path_factory.mktemp("parity")
    sizes = ("--layers", "2", "--hidden", "64", "--vocab-size", "512", "--max-length", "256")
    words = ("demonstrations", str(root / "chats.jsonl"), "--count", "480", "--hints", "none", "--invented")
    settings = {
        "model.name": root / "base",
        "data.path": root / "chats.jsonl",
        "output-dir": root / "sft",
        "max-steps": 50,
        "batch-size": 16,
        "optim.type": "muon",
        "optim.lr": "6e-3",
    }
    flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    here = {"cwd": root, "env": {**os.environ, "BUCKEYE_THREADS": "1"}}
    made = run_here("model", "tiny", root / "base", *sizes, **here)
    assert made.returncode == 0, made.stderr
    assert write_demonstrations(words) == 0
    done = run_here("sft", *flags, **here)
    assert done.returncode == 0, done.stderr + done.stdout
    return root / "sft" / "weights" / "step_50"


@pytest.fixture(scope="module")
def prompts(trained):
    tasks = load_environment("dakota1890", hints="none").tasks("eval")
    renderer = ChatRenderer(str(trained))
    return [renderer.render(tasks[7 * i].messages).ids for i in range(PROMPTS)]


@pytest.fixture(scope="module")
def generations(trained, prompts):
    """(greedy, sampled) generations of the engine, over HTTP."""
    stop = ChatRenderer(str(trained)).stop_token_ids

    async def ask():
        async with served_model(trained) as server:
            client = InferenceClient(
                [server.base_url], api_key=server.api_key, timeout=120, model=server.model
            )
            async with client:
                return [
                    await client.generate_batch(
                        prompts,
                        SamplingParams(max_tokens=24, temperature=t, seed=5, stop_token_ids=stop),
                    )
                    for t in (0.0, 1.0)
                ]

    return asyncio.run(ask())


def test_greedy_tokens_equal_those_of_plain_transformers(trained, prompts, generations):
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    distinct = set()
    for ids, ours in zip(prompts, generations[0], strict=True):
        theirs = model.generate(
            torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        assert ours.token_ids == theirs[0, len(ids) :].tolist()
        distinct.add(tuple(ours.token_ids))
    assert len(distinct) > PROMPTS // 4
    assert "ŋ" in tokenizer.decode(tokenizer("kiŋ")["input_ids"])


def test_engine_log_probs_equal_the_trainers(trained, prompts, generations):
    policy = load_policy(str(trained), torch.device("cpu"))
    token_ids, masks, sampled = [], [], []
    for ids, generation in zip(prompts, generations[1], strict=True):
        token_ids.append(np.array([*ids, *generation.token_ids], dtype=np.int32))
        masks.append(np.array([False] * len(ids) + [True] * len(generation.token_ids)))
        sampled += generation.logprobs
    row = pack_micro_batch(token_ids, masks, policy.device)
    with torch.no_grad():
        logprobs, _ = policy.token_logprobs(row, torch.ones(len(row.targets)))
    assert np.abs(logprobs.numpy() - np.array(sampled)).max() < 1e-4
