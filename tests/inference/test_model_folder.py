"""Inconsistent model directories are refused before a model is built, with the file and the key."""

import json
import shutil

import pytest
import torch

from buckeye.errors import InferenceError, UsageError
from buckeye.inference.engine.architecture import read_spec
from buckeye.trainer.model.policy import load_policy
from buckeye.trainer.parallel.shards import empty_policy

WRONG = {
    "a billion layers": {"num_hidden_layers": 10**9},
    "a wide model": {"hidden_size": 10**7},
    "a large vocabulary": {"vocab_size": 10**9},
    "experts": {"num_experts": 10**9},
    "a text for a number": {"hidden_size": "64"},
    "a list for a number": {"num_attention_heads": [4]},
    "a list of widths": {"intermediate_size": [64, 64]},
    "a text in a list of widths": {"intermediate_size": [64, "64"]},
    "a negative number": {"num_key_value_heads": -2},
    "no heads": {"num_attention_heads": 0},
    "too large for JSON": {"intermediate_size": float("inf")},
    "in a part": {"text_config": {"num_hidden_layers": 10**9}},
}
ODD = {
    "architectures": {"architectures": 3},
    "no architecture": {"architectures": []},
    "another architecture": {"architectures": ["GPT2LMHeadModel"]},
    "no number of heads": {"num_attention_heads": None},
    "kinds of layers": {"layer_types": 5},
    "rope": {"rope_parameters": "fast"},
    "a scale of rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": None}},
    "positions": {"max_position_embeddings": 1e400},
    "an epsilon": {"rms_norm_eps": {}},
    "ends of text": {"eos_token_id": [[]]},
}


@pytest.fixture
def folder(make_model, tmp_path):
    """Return a function that copies a model and replaces keys of its configuration."""

    def copied(changes):
        directory = tmp_path / "model"
        shutil.copytree(make_model("qwen3").directory, directory)
        config = directory / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
        return directory

    return copied


@pytest.mark.parametrize("case", WRONG)
def test_impossible_sizes_are_refused(folder, case, refusal):
    directory, device = folder(WRONG[case]), torch.device("cpu")
    with refusal(InferenceError):
        read_spec(directory)
    for build in (load_policy, lambda *words: empty_policy(*words, flash=False)):
        with refusal(UsageError):
            build(str(directory), device)


@pytest.mark.parametrize("case", ODD)
def test_keys_of_a_wrong_type_are_refused(folder, case):
    with pytest.raises(InferenceError, match=r"/config\.json"):
        read_spec(folder(ODD[case]))


NO_WEIGHTS = {
    "empty": b"",
    "cut off": (8).to_bytes(8, "little") + b"[[[[[[[[",
    "a huge header": b"\xff" * 16,
    "a list": (2).to_bytes(8, "little") + b"[]",
    "no shape": (12).to_bytes(8, "little") + b'{"a": 12345}',
}
NO_CONFIG = {"a list": b"[]", "cut off": b"{", "nested": b"[" * 100_000, "no UTF-8": b"\xff"}


@pytest.mark.parametrize("content", NO_WEIGHTS.values(), ids=NO_WEIGHTS)
def test_invalid_safetensors_files_are_refused(folder, content, refusal):
    directory = folder({})
    (directory / "model.safetensors").write_bytes(content)
    with refusal(UsageError):
        read_spec(directory)


@pytest.mark.parametrize("content", NO_CONFIG.values(), ids=NO_CONFIG)
def test_invalid_config_files_are_refused(folder, content, refusal):
    directory = folder({})
    (directory / "config.json").write_bytes(content)
    with pytest.raises(InferenceError, match=r"config\.json"):
        read_spec(directory)
    with refusal(UsageError):
        load_policy(str(directory), torch.device("cpu"))
