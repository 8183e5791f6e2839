"""Forced tool calls: the reply is begun for the model, as far as a call can be written without it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from buckeye.errors import UsageError
from buckeye.inference.render.renderer import ChatRenderer, Conversation
from buckeye.inference.render.template import opens_thinking

WRITTEN_AS_TEXT = (None, "qwen3", "prime-qwen3", "llama-3")
"""Families whose reasoning and calls stand in the text of a reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """How a reply begins before anything is sampled; `ids` are the tokens of `text`."""

    text: str = ""
    ids: tuple[int, ...] = ()


NO_OPENING = Opening()
"""Of a reply that the model begins itself."""


def call_opening(renderer: ChatRenderer, conversation: Conversation, name: str | None) -> Opening:
    """The beginning of a call of the tool `name`, or of any with None. Without reasoning: what is begun for
    the model it does not think about. Raises `UsageError` for a family whose calls are not text."""
    family, template = renderer.family, renderer.template
    if (family.name if family else None) not in WRITTEN_AS_TEXT:
        raise UsageError(
            "`tool_choice` may be auto or none for this model: its family writes calls in a way that this "
            "server cannot begin for it."
        )
    thought = ""
    if opens_thinking(conversation.text):
        thought = "\n</think>\n\n"
    elif template.thinks:
        thought = "<think>\n\n</think>\n\n"
    bare = template.call_format == "json"
    tag, arguments = ("", "parameters") if bare else ("<tool_call>\n", "arguments")
    # No space at the end: most tokenizers have it in the token that comes next.
    rest = ' "' if name is None else f' {json.dumps(name, ensure_ascii=False)}, "{arguments}":'
    text = f'{thought}{tag}{{"name":{rest}'
    return Opening(text=text, ids=tuple(renderer.encode(text)))
