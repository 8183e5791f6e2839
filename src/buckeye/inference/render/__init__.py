"""Conversion between messages and tokens.

The chat template of a model converts messages to prompts. Replies are parsed to messages. Sampled tokens are
never tokenized again.
"""

from buckeye.inference.render.renderer import ChatRenderer, Conversation

__all__ = ["ChatRenderer", "Conversation"]
