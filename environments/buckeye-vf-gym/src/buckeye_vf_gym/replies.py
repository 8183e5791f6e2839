"""Replies of a chat server as Buckeye's environments take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from buckeye.envs.base import Reply

NO_ROOM = Reply(text="", finish_reason="length", message={"role": "assistant", "content": ""})
"""There was no room for a reply: the rollout ends, and is graded."""


def reply_of(message: Mapping[str, Any], *, cut: bool) -> Reply:
    """A reply of an assistant message in the OpenAI form. `cut` means that it ended at a length limit.

    A server that takes thoughts apart has put them into `reasoning_content`; the text has them in their tags.
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
    said = {"role": "assistant", "content": "", **kept}
    return Reply(text=text, finish_reason="length" if cut else "stop", message=said)
