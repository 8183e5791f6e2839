"""Conversion between messages and tokens.

Prompts come from the model's chat template, and replies are parsed to messages. Sampled tokens are never
re-encoded.
"""

from buckeye.inference.render.renderer import ChatRenderer, Conversation

__all__ = ["ChatRenderer", "Conversation"]
