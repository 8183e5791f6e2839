"""Loading of a model's tokenizer without importing torch, if possible.

`AutoTokenizer` imports torch, which takes 150 MB and two seconds. `_CLASSES` lists the classes of tokenizers
that can be loaded without `AutoTokenizer`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from buckeye.base.storage import read_json
from buckeye.errors import InferenceError, first_line

_GENERIC = "TokenizersBackend"
_CLASSES = {
    "TokenizersBackend": (_GENERIC, ("llama", "qwen3", "qwen3_moe")),
    "PreTrainedTokenizer": (_GENERIC, ("llama", "qwen3", "qwen3_moe")),
    "Qwen2Tokenizer": ("Qwen2Tokenizer", ("qwen2", "qwen3", "qwen3_moe")),
    "GPT2Tokenizer": ("GPT2Tokenizer", ("llama",)),
}
"""By the `tokenizer_class` of a model (without "Fast"): the class that `AutoTokenizer` selects if the model's
`model_type` is one of the listed values.
"""


def load_tokenizer(model_path: str) -> Any:
    """Load the tokenizer of a local directory or a Hub id, as `AutoTokenizer` does.

    Raise `InferenceError` if the tokenizer cannot be loaded, and `ModuleNotFoundError` without transformers.
    """
    loader = _tokenizer_class(Path(model_path))
    try:
        tokenizer = loader.from_pretrained(model_path)
        tokenizer.decode(tokenizer.encode("a b"))  # invalid settings raise errors only here
        return tokenizer
    # transformers raises many exceptions for a directory without a usable tokenizer
    except Exception as error:
        reason = first_line(error).rstrip(": ")
        raise InferenceError(
            f"cannot load a tokenizer from {model_path}: {reason}",
            code="BK-TOKENIZER",
            hint="copy the tokenizer files next to the weights",
        ) from error


def rust_tokenizer(tokenizer: Any) -> Any:
    """Return the Rust tokenizer whose encoding and decoding `tokenizer` uses unchanged, or None.

    transformers checks the type of every token id, which takes longer than the decoding.
    """
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if rust is None:
        return None
    changed = {
        name
        for one in type(tokenizer).__mro__
        if one.__name__ not in ("TokenizersBackend", "PreTrainedTokenizerBase")
        for name in vars(one)
    }
    is_changed = changed & {"encode", "_encode_plus", "decode", "_decode"}
    return None if is_changed or tokenizer.split_special_tokens else rust


def _tokenizer_class(directory: Path) -> Any:
    name = None if "torch" in sys.modules else _known_class(directory)
    if name == _GENERIC:
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        return TokenizersBackend
    import transformers

    return getattr(transformers, name or "AutoTokenizer")


def _known_class(directory: Path) -> str | None:
    """Return the name of the class that `AutoTokenizer` selects, or None if it is not in `_CLASSES`."""
    if not (directory / "tokenizer.json").is_file():
        return None
    settings, model = (_read_object(directory / name) for name in ("tokenizer_config.json", "config.json"))
    if "auto_map" in settings or (directory / "tekken.json").exists():
        return None
    stored = settings.get("tokenizer_class")
    class_name, families = _CLASSES.get(str(stored).removesuffix("Fast"), (None, ()))
    return class_name if model.get("model_type") in families else None


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} for an invalid file. transformers reports invalid files."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
