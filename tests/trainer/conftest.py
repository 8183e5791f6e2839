"""A tiny model with a tokenizer, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


def _save_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 264,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="session")
def build_model(tmp_path_factory):
    """`build_model(ConfigClass, **changes)`: the directory of a two-layer model with a byte tokenizer."""

    def build(config_class, **changes) -> Path:
        directory = tmp_path_factory.mktemp("model")
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config_class(**{**SHAPE, **changes}))
        with torch.no_grad():  # larger than the usual 0.02, so that tokens differ and errors show
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(6.0)
        model.save_pretrained(directory)
        _save_tokenizer(directory)
        return directory

    return build


@pytest.fixture(scope="session")
def tiny_model(build_model) -> Path:
    """A Qwen3 with grouped key-value heads and tied embeddings."""
    return build_model(Qwen3Config)


@pytest.fixture(scope="session")
def tiny_llama(build_model) -> Path:
    """A Llama with an output layer of its own."""
    return build_model(LlamaConfig, tie_word_embeddings=False)
