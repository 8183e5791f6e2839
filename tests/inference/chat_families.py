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
_WITH_CALLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_EACH = "{% for c in m.tool_calls %}BODY{% endfor %}"
_LIST = "[" + _EACH.replace("BODY", "{% if not loop.first %}, {% endif %}BODY") + "]"
_PYTHON = _LIST.replace(
    "BODY",
    "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}="
    "{% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}{% if not loop.last %}, {% endif %}"
    "{% endfor %})",
)
_CODER = (
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n"
    "</tool_call>"
)
_JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
_CALLS = {
    "coder": _EACH.replace("BODY", _CODER),
    "pythonic": _PYTHON,
    "lfm2": f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>",
    "mistral": "[TOOL_CALLS]" + _LIST.replace("BODY", _JSON),
    "ministral": _EACH.replace(
        "BODY", "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    ),
}
"""Calls in the forms of Qwen3-Coder, Llama 3.2, LFM2 and Mistral."""
FAMILIES = {
    "qwen2.5": (_CHATML, _TAGS[:2], "<|im_end|>", "qwen2"),
    "qwen3": (_CHATML, _TAGS, "<|im_end|>", "qwen3"),
    "llama3": (_LLAMA, [], "<|eot_id|>", "llama"),
    "smollm2": (_CHATML, [], "<|im_end|>", "llama"),
    "default": (_CHATML, [], "<|im_end|>", "qwen3"),
    "coder": (_CHATML, _TAGS[:2], "<|im_end|>", "qwen3_moe"),
    "pythonic": (_CHATML, [], "<|im_end|>", "llama"),
    "lfm2": (_CHATML, ["<|tool_call_start|>", "<|tool_call_end|>"], "<|im_end|>", "lfm2"),
    "mistral": ([*_CHATML, "[TOOL_CALLS]"], [], "<|im_end|>", "mistral"),
    "ministral": ([*_CHATML, "[TOOL_CALLS]", "[ARGS]"], [], "<|im_end|>", "ministral"),
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

    if family in _CALLS:
        return _WITH_CALLS.replace("CALLS", _CALLS[family])
    path = TEMPLATES / f"{family}.jinja"
    return path.read_text(encoding="utf-8") if path.is_file() else CHAT_TEMPLATE
