"""Between messages and tokens: prompts by the model's own chat template, replies read back as messages, and
sampled tokens that stay what they were."""

from buckeye.inference.render.renderer import ChatRenderer, Conversation

__all__ = ["ChatRenderer", "Conversation"]
