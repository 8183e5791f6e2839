"""Small tokenizers with the special tokens and chat templates of the model families."""

import json
from pathlib import Path

TEMPLATES = Path(__file__).parent / "chat_templates"

_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
_LLAMA = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
]
FAMILIES = {
    "qwen2.5": (_CHATML, _TAGS[:2], "<|im_end|>", "qwen2"),
    "qwen3": (_CHATML, _TAGS, "<|im_end|>", "qwen3"),
    "llama3": (_LLAMA, [], "<|eot_id|>", "llama"),
    "smollm2": (_CHATML, [], "<|im_end|>", "llama"),
    "default": (_CHATML, [], "<|im_end|>", "qwen3"),
}
"""Special tokens, further added tokens, end-of-text token and `model_type` of each family."""

_CORPUS = [
    'the quick brown fox jumps over the lazy dog, the end {"name": "find", "arguments": {"word": "dog"}}',
    "user assistant system tool <tools> </tools> You may call one or more functions",
]


def save_family(family: str, directory: Path, template: str | None = None) -> Path:
    """Save the tokenizer, template and `model_type` of a family; `template` replaces the family's own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special, tags, eos, model_type = FAMILIES[family]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS * 4, trainer)
    backend.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, bos_token=special[0] if family == "llama3" else None
    )
    fast.chat_template = template or template_of(family)
    fast.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


def template_of(family: str) -> str:
    from .conftest import CHAT_TEMPLATE

    path = TEMPLATES / f"{family}.jinja"
    return path.read_text(encoding="utf-8") if path.is_file() else CHAT_TEMPLATE
