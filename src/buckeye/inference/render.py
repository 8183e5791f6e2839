"""Chat messages to token ids, by the model's own chat template, without ever re-tokenising what was
sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from buckeye.envs.base import Message, Tool
from buckeye.errors import InferenceError, UsageError

_PROBE = "buckeye"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A prompt: token ids, and the exact text that they stand for."""

    ids: list[int]
    text: str


class ChatRenderer:
    """The tokenizer and chat template of a model (a local directory or a Hub id)."""

    def __init__(self, model_path: str | Path) -> None:
        self.model_path = str(model_path)
        self.tokenizer = _load_tokenizer(self.model_path)
        self.token_text = lru_cache(maxsize=1 << 16)(self._token_text)
        self.stop_token_ids = self._find_stop_token_ids()
        """Every token that ends an assistant's turn, the tokenizer's and the template's."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Conversation:
        """The prompt that asks for the next assistant message. Raises `UsageError` if the template
        refuses."""
        text = self._template(messages, tools, add_generation_prompt=True)
        return Conversation(ids=self.encode(text), text=text)

    def extend(
        self,
        conversation: Conversation,
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
    ) -> Conversation | None:
        """The next turn's prompt: the earlier ids, the sampled ids, and only what follows newly tokenised.

        None if the template's text of `messages` does not start with the earlier text and the sampled one
        (some drop or rewrite earlier turns).
        """
        earlier = conversation.text + self.decode(sampled_ids)
        text = self._template(messages, tools, add_generation_prompt=True)
        if not text.startswith(earlier):
            return None
        return Conversation(
            ids=[*conversation.ids, *sampled_ids, *self.encode(text[len(earlier) :])], text=text
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens recognised, none added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _token_text(self, token_id: int) -> str:
        """The text of one token alone."""
        return self.decode([token_id])

    def _template(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, add_generation_prompt: bool
    ) -> str:
        if not self.tokenizer.chat_template:
            raise UsageError(
                f"The tokenizer of {self.model_path} has no chat template, so it cannot render messages."
            )
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise UsageError(
                f"The chat template of {self.model_path} cannot render these messages: {error}"
            ) from error

    def _find_stop_token_ids(self) -> tuple[int, ...]:
        found = [self.tokenizer.eos_token_id, *_generation_eos(Path(self.model_path)), self._end_of_turn()]
        return tuple(dict.fromkeys(token for token in found if token is not None))

    def _end_of_turn(self) -> int | None:
        """The special token that the template writes after an assistant's message, if it does. (Base models
        with a template often name another token as their end of text.)"""
        if not self.tokenizer.chat_template:
            return None
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self._template(turn, (), add_generation_prompt=False)
        except UsageError:
            return None
        after = self.encode(text[text.rfind(_PROBE) + len(_PROBE) :])
        return after[0] if after and after[0] in self.tokenizer.added_tokens_decoder else None


def _load_tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path)
    except Exception as error:  # transformers raises many classes for a directory without a usable tokenizer
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InferenceError(f"No tokenizer could be loaded from {model_path}: {reason}") from error


def _generation_eos(directory: Path) -> list[int]:
    path = directory / "generation_config.json"
    if not path.is_file():
        return []
    eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return eos if isinstance(eos, list) else [eos]
