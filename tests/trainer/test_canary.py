"""The canary accepts correct servers of any precision, and finds servers with wrong weights.

A second model computes the replies of the server.
"""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from buckeye.inference.client.canary import compare_canary
from buckeye.inference.types import Generation
from buckeye.trainer.model.policy import load_policy
from buckeye.trainer.output.hf_directory import read_tokenizer_files
from buckeye.trainer.output.weight_rounding import canary_prompt, make_canary
from buckeye.transport.weights import Canary

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prompt(tiny_model):
    return canary_prompt(read_tokenizer_files(str(tiny_model)), 264)


@pytest.fixture(scope="module")
def versions(tiny_model, prompt, tmp_path_factory):
    """Directories of a model trained on the text of the prompt, and of one trained a little longer."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("versions")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    text = torch.tensor([[*prompt, *prompt[:24]]])
    saved = []
    for steps in (120, 20):
        for _ in range(steps):
            optimizer.zero_grad()
            model(text, labels=text).loss.backward()
            optimizer.step()
        saved.append(folder / f"{len(saved)}")
        model.save_pretrained(saved[-1])
    return saved


def canary_of(model, prompt, dtype="float32"):
    policy = load_policy(str(model), CPU, compute_dtype=dtype)
    return make_canary(policy, prompt=prompt)


def reply_of(canary):
    return Generation(
        token_ids=canary.token_ids, logprobs=canary.logprobs, versions=[1] * 4, finish_reason="length"
    )


def compared(canary, reply, *, dtype="float32", previous=None, checksum="new"):
    return compare_canary(canary, checksum, reply, dtype=dtype, previous=previous)


def test_prompt_is_a_natural_text(tiny_model, prompt):
    files = read_tokenizer_files(str(tiny_model))
    assert len(prompt) == 24  # the end of the text: this tokenizer has a token per byte
    assert len(set(canary_prompt(files, 40))) == 8  # ids beyond the vocabulary are left out: too few remain
    assert canary_prompt({"tokenizer.json": b"{}"}, 264) == canary_prompt({}, 264) == list(range(0, 264, 33))


@pytest.mark.parametrize("server", ["float32", "bfloat16"])
def test_correct_server_passes(versions, prompt, server):
    canary = canary_of(versions[0], prompt)
    reply = reply_of(canary_of(versions[0], prompt, server))
    result = compared(canary, reply, dtype=server)
    assert (result.problem, result.warning) == (None, None)
    later = compared(
        canary_of(versions[1], prompt),
        reply_of(canary_of(versions[1], prompt, server)),
        dtype=server,
        previous=replace(result, checksum="old"),
    )
    assert (later.problem, later.warning) == (None, None)


def stale_layer(new, old):
    new.model.layers[0].load_state_dict(old.model.layers[0].state_dict())


def transposed(new, old):
    del old
    weight = new.model.layers[1].self_attn.o_proj.weight
    with torch.no_grad():
        weight.copy_(weight.T.clone())


def missing_adapter(new, old):
    new.load_state_dict(old.state_dict())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [stale_layer, transposed, missing_adapter])
def test_server_with_wrong_weights_has_a_problem(tiny_model, versions, prompt, fault, dtype):
    canary = canary_of(versions[0], prompt)
    policies = [load_policy(str(name), CPU, compute_dtype=dtype) for name in (versions[0], tiny_model)]
    fault(*(policy.model for policy in policies))
    result = compared(canary, reply_of(make_canary(policies[0], prompt=prompt)), dtype=dtype)
    assert result.problem is not None, result.difference
    assert result.first_difference is None


def far(logprob, *, token=1, dtype="bfloat16", margin=0.0):
    canary = Canary(dtype=dtype, prompt_ids=[1], token_ids=[1], logprobs=[-1.0], margins=[margin])
    generation = Generation(token_ids=[token], logprobs=[logprob], versions=[1], finish_reason="length")
    return canary, generation


def verdict(result):
    return "problem" if result.problem else "warning" if result.warning else "passed"


@pytest.mark.parametrize(
    ("dtype", "differences"),
    [("float32", (0.0009, 0.003, 0.005)), ("float16", (0.02, 0.09, 0.11)), ("bfloat16", (0.19, 0.7, 0.9))],
)
def test_limits_of_the_first_comparison_follow_the_dtype(dtype, differences):
    found = [verdict(compared(*far(-1.0 - d, dtype=dtype), dtype=dtype)) for d in differences]
    assert found == ["passed", "warning", "problem"]
    assert verdict(compared(*far(float("nan"), dtype=dtype), dtype=dtype)) == "problem"


def test_later_limits_follow_the_first_difference():
    """The server differed by 0.1: the limit is 0.3, and a problem begins at 0.8; or by 0.5: 1.5 and 3."""
    for first, differences in ((0.1, (0.29, 0.7, 0.9)), (0.5, (1.4, 2.9, 3.1))):
        previous = compared(*far(-1.0 - first), checksum="old", dtype="bfloat16")
        assert previous.first_difference == pytest.approx(first)
        results = [compared(*far(-1.0 - d), dtype="bfloat16", previous=previous) for d in differences]
        assert [verdict(result) for result in results] == ["passed", "warning", "problem"]
        assert {result.first_difference for result in results} == {previous.first_difference}


def test_difference_of_a_failed_comparison_is_no_limit():
    failed = compared(*far(-9.0), checksum="old", dtype="bfloat16")
    assert failed.problem is not None
    assert verdict(compared(*far(-3.0), dtype="bfloat16", previous=failed)) == "problem"


def test_other_token_counts_with_half_the_margin():
    assert verdict(compared(*far(-1.0, token=2, margin=0.3), dtype="bfloat16")) == "passed"
    assert verdict(compared(*far(-1.0, token=2, margin=4.0), dtype="bfloat16")) == "problem"


def test_unchanged_log_probs_are_a_problem_when_changes_add_up():
    """The trainer's log-prob moves by 0.15 per version, and the server's stays."""
    found, previous = [], None
    for step in range(3):
        canary, reply = far(-1.0)
        canary = replace(canary, logprobs=[-1.0 - 0.15 * step])
        previous = compared(canary, copy.copy(reply), dtype="bfloat16", checksum=str(step), previous=previous)
        found.append(verdict(previous))
    assert found == ["passed", "warning", "problem"]
