"""Models of the GPU benchmark: random weights in the shapes of Qwen3-0.6B and Qwen3-4B, without a network.

Their tokenizer maps every token id to letters, so that random samples have text and different rewards.
"""

from __future__ import annotations

import itertools
import string
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {  # config.json of Qwen/Qwen3-0.6B
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    },
    "4B": {  # config.json of Qwen/Qwen3-4B
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    },
    "small": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
    },
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
    },
}

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(directory: Path, size: str, *, device: Any, dtype: str | None = None, seed: int = 0) -> int:
    """Write a model directory with random weights, drawn on `device`; return the number of parameters.

    The weights are bfloat16 by default, those of the tiny model float32.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    shape = SHAPES[size]
    tokenizer = make_tokenizer(shape["vocab_size"])
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(seed)
    config = Qwen3Config(**shape, **ids, bos_token_id=None, tie_word_embeddings=True)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    model.to(getattr(torch, dtype or ("float32" if size == "tiny" else "bfloat16"))).save_pretrained(
        directory
    )
    tokenizer.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def make_tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer that reads bytes and writes all of its `vocab_size` ids.

    The ids are special tokens, bytes, then groups of letters.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = (*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *_letter_groups(vocab_size))
    vocab = {piece: number for number, piece in enumerate(pieces[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_SPECIAL[0],
        eos_token=_SPECIAL[2],
        additional_special_tokens=[_SPECIAL[1]],
        chat_template=_CHAT_TEMPLATE,
    )


def _letter_groups(count: int) -> list[str]:
    """Return `count` different groups of three or four letters."""
    groups = (
        "".join(letters)
        for length in (3, 4)
        for letters in itertools.product(string.ascii_lowercase, repeat=length)
    )
    return list(itertools.islice(groups, count))
