"""Extract the text that a model can read from a tool result."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence

import mcp_types as types

_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/yaml")


def extract_text(parts: Sequence[types.ContentBlock]) -> tuple[str, Counter[str]]:
    """Return the joined text of all parts, and the number of parts without text for each kind of part."""
    texts = [_part_text(part) for part in parts]
    dropped = Counter[str](part.type for part, text in zip(parts, texts, strict=True) if text is None)
    return "\n".join(text for text in texts if text is not None), dropped


def _part_text(part: types.ContentBlock) -> str | None:
    """Return the text of a part, or None for images, audio and binary files."""
    if isinstance(part, types.TextContent):
        return part.text
    if isinstance(part, types.ResourceLink):
        return f"{part.name}: {part.uri}"
    if not isinstance(part, types.EmbeddedResource):
        return None
    if isinstance(part.resource, types.TextResourceContents):
        return part.resource.text
    if not (part.resource.mime_type or "").lower().startswith(_TEXT_TYPES):
        return None
    try:  # some servers base64-encode text files too
        return base64.b64decode(part.resource.blob, validate=True).decode()
    except ValueError:
        return None
