"""Chat template and tokenizer from a model's own files, without torch and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from buckeye.errors import InferenceError


@lru_cache(maxsize=4)
def generation_header(model: Path) -> str | None:
    """Return the text before a reply; None if the chat template cannot be rendered."""
    from buckeye.inference.render.template_files import read_template

    try:
        template = read_template(model)
    except InferenceError:
        return None
    return None if template is None else template.header


@lru_cache(maxsize=4)
def load_tokenizer_file(model: Path) -> Any:
    """Return the tokenizer in a model's directory; None if it cannot be loaded."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception:  # the library raises no narrower class
        return None


def decode_tokens(model: Path, ids: Sequence[int] | npt.NDArray[np.int32]) -> str | None:
    """Return the text of tokens, including special tokens; None if they cannot be decoded."""
    tokenizer = load_tokenizer_file(model)
    if tokenizer is None:
        return None
    try:
        return str(tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))
    except (OverflowError, ValueError):
        return None
