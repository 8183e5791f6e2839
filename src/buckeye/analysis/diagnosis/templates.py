"""What a model's own files say of its chat template and tokens; neither torch nor transformers is needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from buckeye.base.storage import read_json


@lru_cache(maxsize=4)
def generation_header(model: Path) -> str | None:
    """Return what the chat template adds for the reply to come; None where it cannot be rendered."""
    from buckeye.inference.render.template_sandbox import Template

    source, names = _template(model)
    if source is None:
        return None
    chat = [{"role": "user", "content": "question"}]
    try:
        template = Template(source)
        without, with_it = (
            template.render(chat, tools=None, add_generation_prompt=prompt, **names)
            for prompt in (False, True)
        )
    except Exception:  # whatever a template raises
        return None
    return with_it[len(without) :] if with_it.startswith(without) else None


def _template(model: Path) -> tuple[str | None, dict[str, Any]]:
    """The template, and the special tokens that it may name."""
    names, source = dict[str, Any](), None
    try:
        settings = read_json(model / "tokenizer_config.json")
        names = {
            name: value
            for name, value in settings.items()
            if isinstance(value, str) and name.endswith("_token")
        }
        source = settings.get("chat_template")
        source = (model / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError, AttributeError):
        pass
    return (source if isinstance(source, str) else None), names


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
