"""Small Qwen3 model with random weights, and a tokenizer trained on given texts, for the demo and tests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from buckeye.base.storage import write_directory
from buckeye.errors import UsageError

_HEAD_DIM = 64
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TAG = re.compile(r"</?[a-z]+>")


@dataclass(frozen=True, kw_only=True, slots=True)
class TinySize:
    """Sizes of the model. The head size is 64, the MLP has size 3 * `hidden`, two query heads share a key."""

    vocab_size: int = 1024
    layers: int = 4
    hidden: int = 256
    max_length: int = 2048

    def __post_init__(self) -> None:
        if self.hidden % _HEAD_DIM:
            raise UsageError(
                f"{self.hidden} is not a multiple of {_HEAD_DIM}", code="BK-CLI-ARGUMENT", at="--hidden"
            )


def make_tiny_model(directory: Path, *, texts: Sequence[str], size: TinySize, seed: int) -> int:
    """Write a model directory and return its number of parameters.

    The tokenizer is trained on `texts`. Raise `UsageError` if the directory exists.
    """
    if directory.exists():
        raise UsageError(
            f"{directory} exists already; nothing was overwritten",
            code="BK-FILE-EXISTS",
            hint="choose another name",
        )
    tokenizer = train_tokenizer(texts, vocab_size=size.vocab_size)
    model = _random_model(size, tokenizer, seed)

    def fill(target: Path) -> None:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)

    directory.parent.mkdir(parents=True, exist_ok=True)
    write_directory(directory, fill)
    return sum(p.numel() for p in model.parameters())


def train_tokenizer(texts: Sequence[str], *, vocab_size: int) -> Any:
    """Return a byte-level BPE tokenizer with a ChatML template.

    Only words after a space or at the start of a line become tokens of several letters. In other words, such
    as words after a quotation mark or a tag, each letter is a token, so that the model sees the spelling.
    Every letter of `texts` is one token, including multi-byte letters. Every tag that at least half of the
    texts use, such as `<answer>`, is one token, if the vocabulary has room for it next to the 256 bytes.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" \p{L}+|(?<![^\n])\p{L}+|\s|\S"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tags = common_tags(texts)[: vocab_size - 256 - len(_SPECIAL_TOKENS)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(texts), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_SPECIAL_TOKENS[0],
        eos_token=_SPECIAL_TOKENS[2],
        chat_template=_CHAT_TEMPLATE,
    )


def common_tags(texts: Sequence[str]) -> list[str]:
    """Return the tags, such as `<answer>`, that at least half of the texts use."""
    counts = Counter(tag for text in texts for tag in set(_TAG.findall(text)))
    return sorted(tag for tag, count in counts.items() if 2 * count >= len(texts))


def _training_texts(texts: Sequence[str]) -> Iterable[str]:
    """Yield each multi-byte letter many times, so that its bytes are merged first, and then the texts."""
    letters = {char for text in texts for char in text if ord(char) > 127}
    repetitions = sum(len(text) for text in texts) // 4 + 2
    for letter in sorted(letters):
        yield from repeat(letter, repetitions)
    yield from texts


def _random_model(size: TinySize, tokenizer: Any, seed: int) -> Any:
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    heads = size.hidden // _HEAD_DIM
    config = Qwen3Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=_HEAD_DIM,
        max_position_embeddings=size.max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed % 2**64)
    model = Qwen3ForCausalLM(config)
    # transformers sets the embedding of the pad token to 0, where RMSNorm has gradients of about 1,000
    torch.nn.init.normal_(
        model.get_input_embeddings().weight[tokenizer.pad_token_id], std=config.initializer_range
    )
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model
