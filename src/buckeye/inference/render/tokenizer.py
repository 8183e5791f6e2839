"""Load a model's tokenizer, without torch where that is possible.

transformers chooses a tokenizer's class in a module that imports torch, which takes 150 MB and two seconds.
For the families below the choice is known; whoever only writes and reads text needs no more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from buckeye.base.storage import read_json
from buckeye.errors import InferenceError

_GENERIC = "TokenizersBackend"
_CLASSES = {
    "TokenizersBackend": (_GENERIC, ("llama", "qwen3", "qwen3_moe")),
    "PreTrainedTokenizer": (_GENERIC, ("llama", "qwen3", "qwen3_moe")),
    "Qwen2Tokenizer": ("Qwen2Tokenizer", ("qwen2", "qwen3", "qwen3_moe")),
    "GPT2Tokenizer": ("GPT2Tokenizer", ("llama",)),
}
"""The `tokenizer_class` that a model names, without "Fast" -> the class that `AutoTokenizer` takes, and the
`model_type`s for which it does."""


def load_tokenizer(model_path: str) -> Any:
    """The tokenizer of a local directory or a Hub id, as `AutoTokenizer` loads it. Raises `InferenceError`
    if there is none."""
    try:
        tokenizer = _class_of(Path(model_path)).from_pretrained(model_path)
        tokenizer.decode(tokenizer.encode("a b"))  # settings of another kind are found only in use
        return tokenizer
    except Exception as error:  # transformers raises many classes for a directory without a usable tokenizer
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InferenceError(f"No tokenizer could be loaded from {model_path}: {reason}") from error


def _class_of(directory: Path) -> Any:
    name = None if "torch" in sys.modules else _known_class(directory)
    if name == _GENERIC:
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        return TokenizersBackend
    import transformers

    return getattr(transformers, name or "AutoTokenizer")


def _known_class(directory: Path) -> str | None:
    """The name of the class that `AutoTokenizer` takes; None where only that can tell."""
    if not (directory / "tokenizer.json").is_file():
        return None
    settings, model = (_object(directory / name) for name in ("tokenizer_config.json", "config.json"))
    if "auto_map" in settings or (directory / "tekken.json").exists():
        return None
    named = settings.get("tokenizer_class")
    taken, families = _CLASSES.get(str(named).removesuffix("Fast"), (None, ()))
    return taken if model.get("model_type") in families else None


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file has none, of which transformers will complain."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
