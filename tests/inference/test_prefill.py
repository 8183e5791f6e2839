"""Prefill: in parts during decoding, once for shared prompts, and only new tokens on later turns."""

import subprocess
import sys

import pytest
import torch

from buckeye.inference.engine import engine as engine_module
from buckeye.inference.engine.weights import Checkpoint, auto_dtype

from .conftest import PROMPT, finish, make_engine, near, sample

LONG = tuple((7 * i) % 300 for i in range(120))


def next_turn(sequence, more=(5, 6, 7), **params):
    return sample((*sequence.prompt_ids, *sequence.token_ids, *more), **params)


def right(model, *sequences) -> None:
    for s in sequences:
        assert torch.tensor(s.logprobs) == near(model.logprobs(s.prompt_ids, s.token_ids))


def update(engine, model, version=1):
    engine.pause("keep")
    installed = engine.install_weights(Checkpoint(model.directory), version)
    engine.resume()
    engine.step()
    installed.result(timeout=0)


@pytest.fixture
def small_budget(monkeypatch):
    """Limit prefill to 16 tokens per step, and to 8 while other sequences decode."""
    monkeypatch.setattr(engine_module, "_PREFILL_TOKENS", 16)
    monkeypatch.setattr(engine_module, "_PREFILL_TOKENS_WHILE_DECODING", 8)


@pytest.mark.usefixtures("small_budget")
def test_a_long_prompt_does_not_stop_those_that_decode(qwen3):
    engine = make_engine(qwen3.directory)
    short, long = sample(PROMPT[:9], max_tokens=40), sample(LONG, seed=1)
    engine.submit([short])
    engine.step()
    engine.submit([long])
    engine.step()
    sampled = engine.counters["generation_tokens"]
    for step in range(1, 10):
        engine.step()
        assert engine.counters["generation_tokens"] == sampled + step  # one token of the short one per step
    assert len(engine.running) == 1
    finish(engine)
    assert engine.counters["prefill_tokens"] == 8 + 119
    right(qwen3, short, long)


@pytest.mark.usefixtures("small_budget")
def test_a_prompt_in_parts_follows_its_slot_when_others_end(qwen3):
    engine = make_engine(qwen3.directory)
    others = [sample(PROMPT[i : i + 5], seed=i, max_tokens=2 + i) for i in range(4)]
    long = sample(LONG, seed=9)
    finish(engine, *others, long)
    right(qwen3, *others, long)


@pytest.mark.usefixtures("small_budget")
def test_a_prompt_half_computed_can_be_aborted_and_is_begun_anew_under_new_weights(make_model):
    old, new = make_model("qwen3"), make_model("qwen3", seed=1)
    engine = make_engine(old.directory)
    gone, stays = sample(LONG), sample(LONG[3:], seed=1)
    engine.submit([gone, stays])
    engine.step()
    engine.step()
    engine.abort([gone])
    engine.step()
    assert gone.finish_reason == "abort"
    engine.step()
    update(engine, new, 5)
    finish(engine)
    assert stays.version_spans() == [(5, 0, 20)]
    right(new, stays)


def test_the_next_turn_computes_only_what_is_new(qwen3):
    engine = make_engine(qwen3.directory, slots=4, spare=4)
    first = sample()
    finish(engine, first)
    second = next_turn(first, seed=1)
    finish(engine, second)
    third = next_turn(second, seed=2)
    finish(engine, third)
    # the last sampled token was never fed, so 4 tokens are new; all but the last of them are prefilled
    assert engine.counters["prefill_tokens"] == len(PROMPT) - 1 + 3 + 3
    right(qwen3, first, second, third)


def test_the_branches_of_a_turn_share_what_came_before(qwen3):
    engine = make_engine(qwen3.directory, slots=4, spare=4)
    first = sample()
    finish(engine, first)
    branches = [next_turn(first, seed=i) for i in range(4)]
    finish(engine, *branches)
    assert engine.counters["prefill_tokens"] == len(PROMPT) - 1 + 3
    assert len({tuple(b.token_ids) for b in branches}) == 4
    right(qwen3, *branches)


def test_an_earlier_turn_is_not_used_under_other_weights(make_model):
    old, new = make_model("qwen3"), make_model("qwen3", seed=1)
    engine = make_engine(old.directory, slots=4, spare=4)
    first = sample()
    finish(engine, first)
    update(engine, new)
    second = next_turn(first, seed=1)
    finish(engine, second)
    right(new, second)
    computed = [len(s.prompt_ids) - 1 for s in (first, second)]
    assert engine.counters["prefill_tokens"] == sum(computed)


def test_the_turn_during_which_weights_changed(make_model):
    new = make_model("qwen3", seed=1)
    engine = make_engine(make_model("qwen3").directory, slots=4, spare=4)
    first = sample()
    engine.submit([first])
    for _ in range(4):
        engine.step()
    update(engine, new)
    finish(engine)
    before = engine.counters["prefill_tokens"]
    second = next_turn(first, seed=1)
    finish(engine, second)
    right(new, second)
    assert engine.counters["prefill_tokens"] - before == 3


def test_spare_slots_hold_the_latest(qwen3):
    engine = make_engine(qwen3.directory, slots=4, spare=2)
    turns = [sample(PROMPT[i:], seed=i) for i in range(3)]
    for turn in turns:
        finish(engine, turn)
    before = engine.counters["prefill_tokens"]
    following = [next_turn(turn, seed=7) for turn in turns]
    for turn in reversed(following):
        finish(engine, turn)
    assert engine.counters["prefill_tokens"] - before == 3 + 3 + len(following[0].prompt_ids) - 1
    right(qwen3, *following)


def test_after_new_weights_a_shared_prompt_is_computed_once(make_model):
    old, new = make_model("qwen3"), make_model("qwen3", seed=1)
    engine = make_engine(old.directory)
    group = [sample(seed=i, max_tokens=20) for i in range(5)]
    engine.submit(group)
    for _ in range(6):
        engine.step()
    before = engine.counters["prefill_tokens"]
    update(engine, new)
    # all but the last token of each: 29 + 6 of the first, and only the sampled ones of the others
    assert engine.counters["prefill_tokens"] - before == (len(PROMPT) - 1 + 6) + 4 * 5
    finish(engine)
    for s in group:
        assert torch.tensor(s.logprobs[6:]) == near(new.logprobs(PROMPT, s.token_ids)[6:])


def test_small_models_are_computed_in_float32_on_a_cpu(qwen3):
    assert auto_dtype(Checkpoint(qwen3.directory), torch.device("cpu")) is torch.float32
    assert auto_dtype(Checkpoint(qwen3.directory), torch.device("cuda")) is torch.bfloat16


@pytest.mark.e2e
def test_the_server_does_not_load_a_compiler():
    """The compiler would add a third to the memory of a small model's server, and a second to its start."""
    code = "import sys, buckeye.inference.server.server; "
    code += "print({'torch._dynamo', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "set()", found.stderr
