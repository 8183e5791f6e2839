"""Chat template of a model without its tokenizer, for fast checks before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from buckeye.base.storage import read_json
from buckeye.errors import InferenceError
from buckeye.inference.render.template import ChatTemplate

TEMPLATE_FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"


class TemplateFiles:
    """Replacement for the tokenizer of a `ChatTemplate`, with templates and tokens from a model's folder."""

    def __init__(self, folder: Path) -> None:
        """Raise `InferenceError` if a file cannot be read."""
        try:
            settings = _read_settings(folder)
            self._templates = _read_templates(folder, settings)
        except (OSError, ValueError, TypeError, KeyError) as error:
            message = f"cannot read the chat template of {folder}: {error!r}"
            raise InferenceError(message, code="BK-TEMPLATE") from None
        names = {name: _token_text(value) for name, value in settings.items() if name.endswith("_token")}
        self.special_tokens_map = {name: text for name, text in names.items() if text is not None}
        self.added_tokens_decoder: dict[int, Any] = {}
        """Always empty, because checks need no escaping of control tokens."""

    @property
    def chat_template(self) -> str | None:
        """Template for conversations without tools, or None."""
        return self._templates.get("default")

    def get_chat_template(self, *, tools: Any = None) -> str:
        """Return the template for conversations with or without tools.

        Raise `ValueError` if the model has no template.
        """
        template = self._templates.get("tool_use") if tools else None
        if template is None and self.chat_template is None:
            raise ValueError("the model has no chat template")
        return template or self.chat_template or ""


def read_template(folder: Path) -> ChatTemplate | None:
    """Return the chat template in a model's folder, or None.

    Raise `InferenceError` if a file cannot be read.
    """
    files = TemplateFiles(folder)
    return ChatTemplate(files, str(folder)) if files.chat_template else None


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    if not isinstance(settings, dict):
        raise TypeError(f"{path} is not an object")
    return settings


def _read_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the templates by name, from files, or else from tokenizer_config.json."""
    files = {path.stem: path for path in sorted((folder / _FOLDER).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        files["default"] = folder / TEMPLATE_FILE
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    stored = settings.get("chat_template") or {}
    if isinstance(stored, str):
        return {"default": stored}
    return stored if isinstance(stored, dict) else {entry["name"]: entry["template"] for entry in stored}


def _token_text(token: Any) -> str | None:
    """Return the text of a special token. `token` is the text, or an object with the text as `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
