"""Conversion between messages and tokens: prompts from the model's chat template, replies parsed to messages,
and sampled tokens that are never re-encoded.
"""

from buckeye.inference.render.renderer import ChatRenderer, Conversation

__all__ = ["ChatRenderer", "Conversation"]
