"""Sampling stops at each token that ends a text, in any file of a model, and it is trained."""

import json
import shutil
from collections import Counter

import pytest

from buckeye.inference.client import InferenceClient
from buckeye.inference.render import ChatRenderer
from tests.orchestrator.fakes import make_policy

from .conftest import VOCAB, LocalServer, Server, finish, make_engine, sample
from .test_openai_contract import settings_of

QUESTION = [{"role": "user", "content": "fox"}]
TURNS = 24


@pytest.fixture(scope="module")
def folder(chat_model, tmp_path_factory):
    """Chat model with two ends of text in generation_config.json, and another one in its tokenizer."""
    copy = tmp_path_factory.mktemp("stops") / "model"
    shutil.copytree(chat_model.directory, copy)
    renderer, engine = ChatRenderer(copy), make_engine(copy)
    prompt = renderer.render(QUESTION).ids
    replies = [sample(prompt, seed=seed, max_tokens=40, temperature=1.0) for seed in range(8)]
    finish(engine, *replies)
    plain = Counter(t for reply in replies for t in reply.token_ids if 3 <= t < len(renderer.tokenizer))
    stops = [token for token, _ in plain.most_common(3)]
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [*stops[:2], VOCAB + 7]}))
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings["eos_token"] = renderer.tokenizer.convert_ids_to_tokens(stops[2])
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    return copy, set(stops)


@pytest.fixture(scope="module", params=["torch", pytest.param("vllm", marks=[pytest.mark.slow])])
def server(request, folder, tmp_path_factory):
    kind, settings = LocalServer if request.param == "torch" else Server, {}
    if request.param == "vllm":
        settings = {**settings_of("vllm", request), "model": {}, "vllm": {}}
    with kind(folder[0], tmp_path_factory.mktemp(request.param), max_num_seqs=8, **settings) as running:
        yield running


def test_the_renderer_finds_all_of_them(folder):
    copy, stops = folder
    tokens = set(ChatRenderer(copy).stop_token_ids)
    assert stops < tokens
    assert max(tokens) < VOCAB  # engines reject other ids


def test_without_generation_config_the_end_of_text_is_that_of_the_config(folder, tmp_path):
    shutil.copytree(folder[0], tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"eos_token_id": 99}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert 99 in ChatRenderer(tmp_path / "model").stop_token_ids


@pytest.mark.anyio
async def test_each_of_them_ends_a_rollout_and_is_trained(server, folder):
    copy, stops = folder
    found = set()
    async with InferenceClient([server.url], api_key=server.key, model=str(copy), timeout=60) as client:
        for seed in range(TURNS):
            policy = make_policy(client, renderer=ChatRenderer(copy), seq_len=100, seed=seed, max_tokens=60)
            reply = await policy.chat(QUESTION)
            (segment,) = policy.segments
            sampled = [t for t, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]
            assert sampled == list(reply.tokens.token_ids)
            assert stops.isdisjoint(sampled[:-1])
            if reply.finish_reason == "stop" and sampled[-1] in stops:
                found.add(sampled[-1])
                assert segment.logprobs[-1] < 0
    assert found == stops


def test_each_of_them_ends_a_chat(server, folder):
    copy, stops = folder
    with server.http() as http:
        body = {"model": str(copy), "messages": QUESTION, "max_tokens": 60, "logprobs": True, "n": 16}
        answer = http.post("/v1/chat/completions", json={**body, "return_token_ids": True}).json()
    assert "stop" in {choice["finish_reason"] for choice in answer["choices"]}
    for choice in answer["choices"]:
        assert stops.isdisjoint(choice["token_ids"][:-1])
