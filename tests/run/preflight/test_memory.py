"""The memory plan compared with hand-computed numbers, and the settings that it proposes."""

from __future__ import annotations

import json

import pytest

from buckeye.config.load import load_with_warnings
from buckeye.config.rl import RLConfig
from buckeye.launch.preflight.devices import Gpu, MainMemory
from buckeye.launch.preflight.memory_check import check_memory, sum_needs
from buckeye.launch.preflight.memory_plan import MAIN_MEMORY, Hardware, plan_memory, slot_bytes
from buckeye.launch.preflight.model_shape import parse_shape, read_shape

GB = 10**9
# 1,000 x 64 embedding; a layer: 64 x 32 x (2 x 2 + 2 x 1) + 3 x 64 x 128 + 2 x 64 = 36,992
TOY = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
TOY_PARAMETERS = 64_000 + 4 * 36_992 + 64
# Qwen3-0.6B, 596,049,920 parameters
SMALL = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}


def config(*words: str) -> RLConfig:
    common = ["--model.name", "m", "--inference", "{}", "--orchestrator.batch-size", "8"]
    common += ["--trainer.optim.lr", "1e-6"]
    return load_with_warnings(RLConfig, [*common, *words])[0]


def on_cpu(total=32 * GB, free=None, **changes) -> Hardware:
    return Hardware(memory=MainMemory(total=total, free=total if free is None else free), **changes)


def on_gpus(*frees: int, vllm: bool = False) -> Hardware:
    gpus = tuple(Gpu(index=i, name="A", total=24 * GB, free=free) for i, free in enumerate(frees))
    return Hardware(memory=MainMemory(total=64 * GB, free=64 * GB), gpus=gpus, vllm=vllm)


def parts(config, shape, hardware, process, location=MAIN_MEMORY) -> dict[str, int]:
    (need,) = [
        n for n in plan_memory(config, shape, hardware) if (n.process, n.location) == (process, location)
    ]
    assert need.total == sum(part.size for part in need.parts)
    return {part.what: part.size for part in need.parts}


def test_read_shape_of_tiny_model(tmp_path):
    shape = parse_shape(TOY)
    assert (shape.parameters, shape.embeddings, shape.layer) == (TOY_PARAMETERS, 64_000, 37_008)
    assert parse_shape({**TOY, "tie_word_embeddings": False}).parameters == TOY_PARAMETERS + 64_000
    assert parse_shape(SMALL).parameters == pytest.approx(596_049_920, rel=1e-4)
    (tmp_path / "config.json").write_text(json.dumps(TOY))
    assert read_shape(tmp_path) == shape
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "something else"}))
    assert read_shape(tmp_path) is None


def test_plan_memory_of_cpu_trainer():
    given = config("--trainer.seq-len", "256", "--orchestrator.seq-len", "256")
    found = parts(given, parse_shape(TOY), on_cpu(), "trainer 0")
    layer = 4 * 64 + 3 * 64 + 3 * 32 + 4 * 128 + 2 * 64 + 2 * 32  # with padded blocks, as on a CPU
    passing, outside = 3 * 128 + 2 * 64, 3 * 64
    assert found == {
        "weights (float32)": 4 * TOY_PARAMETERS,
        "gradients (float32)": 4 * TOY_PARAMETERS,
        "optimizer (adamw)": 8 * TOY_PARAMETERS,
        "activations of 256 tokens": 4 * 256 * (4 * layer + passing + outside),
        "logits and their gradients": 16 * 256 * 1000 + 4 * 64_000,
        "published weights": 4 * TOY_PARAMETERS,
        "checkpoint copies": 8 * TOY_PARAMETERS,  # 8 of 12: they reuse memory of activations
        "program": 450_000_000,
    }


@pytest.mark.parametrize(
    ("words", "name", "size"),
    [
        (["--trainer.optim.type", "sgd"], "optimizer (sgd)", 4 * TOY_PARAMETERS),
        (["--trainer.optim.type", "adamw8bit"], "optimizer (adamw8bit)", 2 * TOY_PARAMETERS),
        (["--trainer.optim.type", "muon"], "optimizer (muon)", 4 * (TOY_PARAMETERS - 64_000) + 8 * 64_000),
        (["--trainer.loss.kl-coef", "0.1"], "reference model (float32)", 4 * TOY_PARAMETERS),
        (["--trainer.model.compute-dtype", "bfloat16"], "weights (bfloat16)", 2 * TOY_PARAMETERS),
    ],
)
def test_plan_memory_follows_settings(words, name, size):
    assert parts(config(*words), parse_shape(TOY), on_cpu(), "trainer 0")[name] == size


def test_plan_memory_of_adapter_has_its_own_moments_only():
    words = ["--trainer.model.experimental.lora.rank", "8"]
    words += ["--trainer.model.experimental.lora.target-modules", '["q_proj", "down_proj"]']
    found = parts(config(*words), parse_shape(TOY), on_cpu(), "trainer 0")
    adapter = 4 * 8 * ((64 + 64) + (128 + 64))
    assert found["weights (float32)"] == 4 * adapter
    assert found["optimizer (adamw)"] == 8 * adapter
    assert found["frozen weights"] == 4 * TOY_PARAMETERS


@pytest.mark.parametrize(("bits", "per_weight", "dequantized"), [("4bit", 0.516, 4), ("8bit", 1.005, 12)])
def test_plan_memory_of_quantized_base(bits, per_weight, dequantized):
    words = ["--trainer.model.experimental.lora", "{}", "--trainer.model.quantization", bits]
    found = parts(config(*words), parse_shape(TOY), on_cpu(), "trainer 0")
    layers = TOY_PARAMETERS - 64_000  # the embedding is not quantized
    assert found["frozen weights"] == int(per_weight * layers) + 4 * 64_000
    assert found["dequantized matrix"] == dequantized * 64 * 128


def test_plan_memory_of_recomputed_layers_keeps_inputs():
    length = ["--trainer.seq-len", "256", "--orchestrator.seq-len", "256"]
    layer = 4 * 64 + 3 * 64 + 3 * 32 + 4 * 128 + 2 * 64 + 2 * 32
    passing, outside = 3 * 128 + 2 * 64 + layer, 3 * 64
    name = "activations of 256 tokens"
    every = parts(config(*length, "--trainer.model.ac"), parse_shape(TOY), on_cpu(), "trainer 0")
    assert every[name] == 4 * 256 * (4 * 64 + passing + outside)
    second = parts(config(*length, "--trainer.model.ac.freq", "2"), parse_shape(TOY), on_cpu(), "trainer 0")
    assert second[name] == 4 * 256 * (2 * layer + 2 * 64 + passing + outside)


def test_plan_memory_of_sharded_model_is_divided():
    given = config("--inference-gpu-ids", "0", "--trainer-gpu-ids", "1,2")
    needs = plan_memory(given, parse_shape(SMALL), on_gpus(24 * GB, 24 * GB, 24 * GB))
    assert [(n.process, n.location) for n in needs] == [
        ("inference 0", "GPU 0"),
        ("inference 0", MAIN_MEMORY),
        ("orchestrator", MAIN_MEMORY),
        ("trainer 0", "GPU 1"),
        ("trainer 0", MAIN_MEMORY),
        ("trainer 1", "GPU 2"),
        ("trainer 1", MAIN_MEMORY),
    ]
    parameters = parse_shape(SMALL).parameters
    for need in (needs[3], needs[5]):
        sizes = {part.what: part.size for part in need.parts}
        assert sizes["optimizer (adamw)"] == 8 * parameters // 2
        assert "checkpoint copies" not in sizes


def test_plan_memory_of_engine_cache_on_cpu():
    shape = parse_shape(TOY)
    slot = 2 * 4 * 32 * 256 * 4  # keys and values, layers, head size, tokens, bytes
    assert slot_bytes(shape, 256, 4) == slot
    given = config("--seq-len", "256", "--max-async-level", "1")
    found = parts(given, shape, on_cpu(), "inference 0")
    assert found["keys and values"] == 2 * 16 * slot  # two batches of 8, and as many for earlier turns
    small = config("--seq-len", "256", "--inference.kv-cache-gb", "0.001")
    assert parts(small, shape, on_cpu(), "inference 0")["keys and values"] == 10**6 // slot * slot
    vllm = parts(given, shape, on_gpus(24 * GB, 24 * GB, vllm=True), "inference 0", "GPU 0")
    assert list(vllm.values()) == [int(0.9 * 24 * GB)]


@pytest.mark.parametrize(("free", "words"), [(24 * GB, ("0.5",)), (10 * GB, ("0.9",))])
def test_plan_memory_of_engine_cache_on_gpu(free, words):
    """The cache takes the GPU share or the free memory, minus two models, their logits and two gigabytes."""
    shape = parse_shape(SMALL)
    weights = 2 * (shape.parameters + 151_936 * 1024)
    given = config("--seq-len", "8192", "--inference.gpu-memory-utilization", *words)
    found = parts(given, shape, on_gpus(free, 24 * GB), "inference 0", "GPU 0")
    room = 12 * GB if free == 24 * GB else free - found["program"]
    slot = slot_bytes(shape, 8192, 2)
    budget = room - 2 * weights - 4 * 4 * 128 * 151_936 - 2 * 2**30
    assert found["keys and values"] == budget // slot * slot
    assert 3 < budget // slot < 20


def test_plan_memory_of_engine_cache_is_at_least_a_quarter_of_free_memory():
    shape = parse_shape(SMALL)
    given = config("--seq-len", "8192", "--inference.gpu-memory-utilization", "0.2")
    found = parts(given, shape, on_gpus(24 * GB, 24 * GB), "inference 0", "GPU 0")
    slot = slot_bytes(shape, 8192, 2)
    free = 24 * GB - found["program"] - 2 * found["weights"]
    assert found["keys and values"] == free // 4 // slot * slot


def test_check_memory_warns_of_little_free_and_fails_on_little_total_memory():
    given, shape = config("--inference.kv-cache-gb", "0.5"), parse_shape(SMALL)
    need = sum_needs(plan_memory(given, shape, on_cpu(total=100 * GB)), MAIN_MEMORY)
    assert check_memory(given, shape, on_cpu(total=100 * GB, free=need - 1)).state == "warning"
    assert check_memory(given, shape, on_cpu(total=need - 1, free=need - 1)).state == "failed"
    assert check_memory(given, shape, on_cpu(total=need, free=need)).state == "ok"


def test_check_memory_of_gpu_names_settings_to_lower():
    check = check_memory(config("--seq-len", "8192"), parse_shape(SMALL), on_gpus(24 * GB, 16 * GB))
    assert check.state == "failed"
    assert check.seen.startswith("GPU 1: ")
    assert check.do.startswith("for GPU 1: lower --seq-len")


def test_check_memory_names_other_processes_on_gpu():
    held = Gpu(index=1, name="A", total=24 * GB, free=1 * GB, users=(("4321", "python", 23 * GB),))
    hardware = Hardware(
        memory=MainMemory(total=64 * GB, free=64 * GB),
        gpus=(Gpu(index=0, name="A", total=24 * GB, free=24 * GB), held),
    )
    check = check_memory(config("--seq-len", "256"), parse_shape(SMALL), hardware)
    assert check.state == "warning"
    assert "python (4321) uses 23.0 GB" in check.do


def test_plan_memory_has_checkpoint_copies_on_rank_0_only():
    given = config("--inference-gpu-ids", "0", "--trainer-gpu-ids", "1,2")
    copies = [
        sum(part.size for part in need.parts if part.what == "checkpoint copies")
        for need in plan_memory(given, parse_shape(TOY), on_cpu())
        if need.process.startswith("trainer")
    ]
    assert copies == [8 * TOY_PARAMETERS, 0]


@pytest.mark.parametrize(("attention", "kept"), [("flash_attention_2", 0), ("sdpa", 2 * 64 + 2 * 32)])
def test_plan_memory_without_flash_attention_has_padded_blocks(attention, kept):
    words = ["--trainer.seq-len", "256", "--orchestrator.seq-len", "256", "--trainer.model.attn", attention]
    found = parts(config(*words), parse_shape(TOY), on_gpus(24 * GB, 24 * GB), "trainer 0", "GPU 1")
    layer = 4 * 64 + 3 * 64 + 3 * 32 + 4 * 128 + kept
    assert found["activations of 256 tokens"] == 2 * 256 * (4 * layer + 3 * 128 + 2 * 64 + 3 * 64)


@pytest.mark.parametrize(("fast", "model", "width"), [(True, TOY, 4), (True, SMALL, 2), (False, SMALL, 4)])
def test_plan_memory_uses_bfloat16_on_cpu_for_large_models_only(fast, model, width):
    shape = parse_shape(model)
    found = parts(config(), shape, on_cpu(fast_bfloat16=fast), "inference 0")
    assert found["weights"] == width * (shape.parameters + shape.embeddings)


@pytest.mark.parametrize(("words", "size"), [((), GB), (("--inference.kv-cache-gb", "2"), 2 * GB)])
def test_plan_memory_of_vllm_cache_on_cpu(words, size):
    found = parts(config(*words), parse_shape(TOY), on_cpu(vllm=True), "inference 0")
    assert found["keys and values"] == size
