"""What a model's own files say of its chat template and tokens; neither torch nor transformers is needed."""

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
    """Return what stands before the reply to come; None where the chat template cannot be rendered."""
    from buckeye.inference.render.template_files import read_template

    try:
        template = read_template(model)
    except InferenceError:
        return None
    return None if template is None else template.header


@lru_cache(maxsize=4)
def tokenizer_of(model: Path) -> Any:
    """The tokenizer in a model's directory; None where it cannot be read."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception:  # the library raises that alone
        return None


def decoded(model: Path, ids: Sequence[int] | npt.NDArray[np.int32]) -> str | None:
    """The text of tokens, special ones too."""
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        return None
    try:
        return str(tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))
    except (OverflowError, ValueError):
        return None
