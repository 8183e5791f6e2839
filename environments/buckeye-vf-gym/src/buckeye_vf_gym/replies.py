"""Conversion of a chat server's replies to Buckeye's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from buckeye.envs.base import Reply

NO_ROOM = Reply(text="", finish_reason="length", message={"role": "assistant", "content": ""})
"""Reply for a prompt without room for tokens: the rollout ends, and is graded."""


def reply_of(message: Mapping[str, Any], *, cut: bool) -> Reply:
    """Return a reply from an assistant message in the OpenAI form; `cut` means that it hit a length limit.

    If the server put thoughts into `reasoning_content`, the text has them in their tags again.
    """
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought:
        text = f"<think>{thought}</think>\n{text}"
    kept = {
        key: message[key]
        for key in ("content", "reasoning_content", "tool_calls")
        if message.get(key) is not None
    }
    reply = {"role": "assistant", "content": "", **kept}
    return Reply(text=text, finish_reason="length" if cut else "stop", message=reply)
