"""Memory of loading: a rank has its share of the weights, and never a second copy of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.ports import free_port

READ_TOGETHER = 2**24  # bytes of pages of the files: tensors of 8 MiB in bfloat16, stored in float32

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LOAD = """
import sys
from buckeye.config.trainer import TrainerConfig
from buckeye.trainer.setup import build_learner, trainer_process

def peak(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024

tiny, config = map(TrainerConfig.model_validate_json, sys.argv[1:])
with trainer_process(config, "trainer") as ranks:
    build_learner(tiny, ranks, None, max_steps=1)  # imports modules, whose memory does not count
    before = peak("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again
    learner = build_learner(config, ranks, None, max_steps=1)
    print("bytes", peak("VmHWM") - before)
"""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(tmp_path_factory, request) -> Path:
    """Model whose embedding is a quarter of its weights, with files in float32 or bfloat16."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "vocab_size": 40_000}
    config = Qwen2Config(
        **sizes, num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=True, eos_token_id=None
    )
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("model")
    model = Qwen2ForCausalLM(config).to(getattr(torch, request.param))
    model.save_pretrained(directory)
    return directory


def loaded_bytes(tiny: Path, model: Path, output: Path, ranks: int, **settings) -> list[int]:
    """Return the peak of resident memory of each rank while it loads, above the memory before."""
    configs = [
        json.dumps({"model": {"name": str(name), "device": "cpu", **settings}, "output_dir": str(output)})
        for name in (tiny, model)
    ]
    common = os.environ | {"BUCKEYE_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    common |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD, *configs],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [int(text.partition("bytes ")[2]) for text in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_adapter_is_trained_on_one_copy_of_the_weights(tmp_path, tiny_model, model, dtype, width):
    lora = {"lora": {"rank": 8}}
    (found,) = loaded_bytes(tiny_model, model, tmp_path, 1, compute_dtype=dtype, experimental=lora)
    parameters, adapter = parameter_counts()
    assert found <= 1.15 * width * parameters + 4 * adapter


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 8}])
def test_a_rank_loads_its_share(tmp_path, tiny_model, model, lora):
    settings = {"compute_dtype": "bfloat16", "sharding": "full", "experimental": {"lora": lora}}
    parameters, adapter = parameter_counts()
    share = (4 * parameters if lora is None else 2 * parameters + 4 * adapter) / 2
    for found in loaded_bytes(tiny_model, model, tmp_path, 2, **settings):
        assert found <= 1.1 * share + READ_TOGETHER


def parameter_counts() -> tuple[int, int]:
    """Return the number of parameters of the model, and of an adapter of rank 8."""
    hidden, units, keys = 768, 3072, 256
    layer = hidden * (2 * hidden + 2 * keys + 3 * units + 2) + hidden + 2 * keys  # biases of q, k and v
    ends = 4 * hidden + 2 * (hidden + keys) + 3 * (hidden + units)
    return 40_000 * hidden + 12 * layer + hidden, 8 * 12 * ends
