"""Warnings of a dry run about settings that only a trainer with its model would refuse."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import ConfigError
from buckeye.launch.preflight.trainer_checks import reference_warnings, trainer_warnings
from buckeye.transport.checkpoint.base_digest import BASE_DIGEST_KEY, base_digest

LORA = "--trainer.model.experimental.lora.target-modules"

FULL = "--trainer.model.experimental.lora.modules-to-save"


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def warned(words, model=None, *, on_gpu=False):
    argv = ["--trainer", "--orchestrator", *words.split()]
    config = load_config(RLConfig, argv)
    return [*trainer_warnings(config, model, on_gpu=on_gpu), *reference_warnings(config.trainer.loss)]


CUSTOM = "--trainer.loss.type custom --trainer.loss.import-path"


@pytest.mark.parametrize(
    "words",
    [
        f"{CUSTOM} no/loss.py:f",
        f"{CUSTOM} no.such.module:f",
        f"{CUSTOM} json.decoder:f",
        "--orchestrator.advantage.type custom --orchestrator.advantage.import-path no/own.py:f",
        "--trainer.loss.kl-coef 0.1 --trainer.loss.reference-model ./gone",
        "--trainer.supervised.path gone.jsonl",
        f"{LORA} q_proj,query",
        f"{LORA} embed_tokens",
        f"{LORA} q_proj --trainer.model.quantization 4bit {FULL} mlp",
    ],
    ids=[
        "no file",
        "no module",
        "no function",
        "advantage",
        "reference",
        "no chats",
        "unknown layer",
        "embeddings",
        "rounded in full",
    ],
)
def test_trainer_warnings_report_invalid_settings(tiny_model, words, wording):
    assert warned(words, tiny_model) == wording


FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def test_model_that_cannot_be_rounded_is_reported(tiny_model, tmp_path, wording):
    found = {}
    for name, change in (
        ("quantized", {"quantization_config": FOUR_BITS}),
        ("general", {"model_type": "gemma2"}),
    ):
        config = json.loads((tiny_model / "config.json").read_text())
        folder = shutil.copytree(tiny_model, tmp_path / name)
        (folder / "config.json").write_text(json.dumps(config | change))
        lines = warned(f"{LORA} q_proj --trainer.model.quantization 8bit", folder)
        found[name] = [line for line in lines if line.startswith("trainer.model.quantization")]
    assert found == wording
    lines = warned(f"{LORA} q_proj --trainer.model.quantization 8bit", tiny_model, on_gpu=True)
    assert lines == []


ROUNDED = f"{LORA} q_proj --trainer.model.quantization 4bit"


@pytest.mark.parametrize(
    "words",
    [
        "--trainer.model.quantization 4bit",
        f"{ROUNDED} --trainer.model.sharding full",
        f"{ROUNDED} --inference.backend vllm",
        f"{ROUNDED} --inference.model.quantization 8bit",
    ],
    ids=["all weights", "sharded", "vllm", "different"],
)
def test_rounding_that_cannot_work_is_refused(words, refusal):
    with refusal(ConfigError):
        warned(f"--inference {words}")


def test_engine_rounds_as_the_trainer():
    argv = f"--inference {LORA} q_proj --trainer.model.quantization 4bit".split()
    inference = load_config(RLConfig, argv).inference
    assert (inference.model.quantization, inference.backend) == ("4bit", "torch")


def test_chats_that_are_invalid_are_reported(tiny_model, tmp_path):
    chats, flag = tmp_path / "chats.jsonl", "--trainer.supervised.path"
    chats.write_text('{"messages": [{"role": "user", "content": "?"}]}\n')
    (warning,) = warned(f"{flag} {chats}", tiny_model)
    assert warning.startswith("trainer.supervised.path: no assistant message")
    chats.write_text(
        '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}\n'
    )
    assert warned(f"{flag} {chats}", tiny_model) == []


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 100},
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 100},
        {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 100}},
    ],
)
def test_samples_beyond_the_limit_of_rotary_positions_are_reported(tiny_model, tmp_path, rope):
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": None, **rope}))
    (found,) = warned("--orchestrator.seq-len 101 --trainer.seq-len 300", tmp_path)
    assert found.startswith("orchestrator.seq_len is 101, and ")
    assert "to 100 tokens" in found
    assert warned("--orchestrator.seq-len 100 --trainer.seq-len 300", tmp_path) == []
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}\n'
    )
    words = f"--orchestrator.seq-len 100 --trainer.seq-len 300 --trainer.supervised.path {chats}"
    (found,) = warned(words, tmp_path)
    assert found.startswith("trainer.seq_len is 300, and ")


def test_trainer_warnings_are_empty_for_valid_settings(tiny_model, tmp_path):
    (tmp_path / "loss.py").write_text("from math import sqrt as f\n")
    assert warned(f"{CUSTOM} {tmp_path}/loss.py:f") == []
    (tmp_path / "loss.py").write_text("async def g(inputs): ...\n")
    assert "`async def`" in warned(f"{CUSTOM} {tmp_path}/loss.py:g")[0]
    assert warned(f"{CUSTOM} json.decoder:scanstring") == []
    words = f"--trainer.loss.kl-coef 0.1 --trainer.loss.reference-model {tiny_model}"
    assert warned(words, tiny_model) == []
    assert warned(f"{LORA} q_proj,layers.0.mlp.up_proj", tiny_model) == []
    assert warned(f"{LORA} whatever", None) == []  # the model is not available locally


Q = "model.layers.0.self_attn.q_proj"
ADAPTERS = {
    "of this model": (Q, [4, 64], "here", None),
    "of unknown weights": (Q, [4, 64], None, None),
    "of other weights": (Q, [4, 64], "f" * 64, "other weights"),
    "of a wider model": (Q, [4, 128], None, "another model"),
    "of a deeper model": (Q.replace("0", "7"), [4, 64], None, "does not exist"),
    "of modules that files name otherwise": ("model.layers.0.mlp.experts.gate_up", [4, 64], None, None),
    "without its weights": (None, None, None, "has no adapter_model.safetensors"),
}


@pytest.mark.parametrize(("module", "shape", "base", "said"), ADAPTERS.values(), ids=ADAPTERS)
def test_initial_adapter_of_another_model_is_reported(tiny_model, tmp_path, module, shape, base, said):
    settings = {"base_model_name_or_path": "org/base", "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    if module is not None:
        digest = base_digest(str(tiny_model)) if base == "here" else base
        rows = load_file(tiny_model / "model.safetensors")[f"{Q}.weight"].shape[0]
        shapes = {"A": shape, "B": [rows, 4]}
        tensors = {
            f"base_model.model.{module}.lora_{side}.weight": np.zeros(size, np.float32)
            for side, size in shapes.items()
        }
        metadata = None if digest is None else {BASE_DIGEST_KEY: digest}
        save_file(tensors, tmp_path / "adapter_model.safetensors", metadata=metadata)
    found = warned(f"--trainer.model.adapter {tmp_path} --model.name {tiny_model}", tiny_model)
    assert [said in line for line in found] == [True] * (said is not None), found


def test_damaged_adapter_is_reported(tiny_model, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    (line,) = warned(f"--trainer.model.adapter {tmp_path} --model.name {tiny_model}", tiny_model)
    assert "cannot read the adapter" in line


def test_adamw8bit_with_sharded_model_is_refused(refusal, wording):
    kind = "--trainer.optim.type adamw8bit"
    several = f"{kind} --trainer-gpu-ids 1,2"
    assert warned(several, on_gpu=True)[0] == wording
    assert warned(several, on_gpu=False) == warned(kind, on_gpu=True) == []
    assert warned(f"{several} --trainer.model.sharding none", on_gpu=True) == []
    for words in ("--trainer.model.sharding full", "--trainer.model.dp-replicate 2 --trainer-gpu-ids 1,2"):
        with refusal(ConfigError):
            warned(f"{kind} {words}")
