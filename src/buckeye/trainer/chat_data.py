"""Chat conversations as token sequences in which only the assistant's words are trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer, GenerationConfig

from buckeye.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChatSample:
    """`token_ids` i32[T]; `loss_mask` bool[T], True for what the assistant wrote with its end of turn."""

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]


def load_chat_tokenizer(name: str) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer of a model directory or hub name, and the tokens with which a turn can end.

    Raises `UsageError` if there is none, or it has no chat template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UsageError(f"The tokenizer of the model {name!r} cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise UsageError(f"The tokenizer of the model {name!r} has no chat template.")
    try:
        stops = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:
        stops = None
    ids = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])} - {None}
    return tokenizer, tuple(tokenizer.convert_ids_to_tokens(sorted(ids)))


class ChatFile:
    """A file of conversations, one JSON object `{"messages": [{"role", "content"}, ...], "tools"?: [...]}`
    per line, in a shuffled order that depends on nothing but `seed` and the epoch."""

    def __init__(self, path: Path, tokenizer: Any, stop_tokens: Sequence[str], *, seed: int) -> None:
        self.path = path
        self._tokenizer = tokenizer
        self._stop_tokens = tuple(stop_tokens)
        self._seed = seed
        self._lines = _read_lines(path)

    def __len__(self) -> int:
        return len(self._lines)

    def take(self, position: int, count: int) -> list[ChatSample]:
        """The samples of `count` conversations from `position` on in endless shuffled epochs."""
        first, last = position // len(self), (position + count - 1) // len(self)
        epochs = [
            np.random.default_rng((self._seed, e)).permutation(len(self)) for e in range(first, last + 1)
        ]
        start = position - first * len(self)
        order = np.concatenate(epochs)[start : start + count]
        return [sample for index in order.tolist() for sample in self._samples(index)]

    def all(self) -> list[ChatSample]:
        """The samples of every conversation, in the file's order."""
        return [sample for index in range(len(self)) for sample in self._samples(index)]

    def _samples(self, index: int) -> list[ChatSample]:
        number, conversation = self._lines[index]
        try:
            return chat_samples(conversation, self._tokenizer, self._stop_tokens)
        except UsageError as error:
            raise UsageError(f"{self.path}:{number}: {error}") from error


def chat_samples(
    conversation: Mapping[str, Any], tokenizer: Any, stop_tokens: Sequence[str]
) -> list[ChatSample]:
    """A conversation as one sample, or several if the template rewrites earlier turns when later ones come.

    Each assistant turn is what the template adds to the conversation before it (rendered with the generation
    prompt), up to and including the last of `stop_tokens`; it is tokenized apart from its surroundings, as
    when a policy samples it. `UsageError` if the template does not build a turn upon its prompt.
    """
    messages, tools = conversation["messages"], conversation.get("tools")
    samples: list[ChatSample] = []
    pieces: list[tuple[str, bool]] = []
    text = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:index], tools, prompt=True)
        done = _render(tokenizer, messages[: index + 1], tools, prompt=False)
        if not done.startswith(prompt):
            raise UsageError(
                f"the chat template does not continue its own generation prompt for message {index}; such a "
                "template cannot be trained on"
            )
        if pieces and not prompt.startswith(text):
            samples.append(_tokenize(pieces, tokenizer))
            pieces, text = [], ""
        end = _end_of_turn(done, len(prompt), stop_tokens)
        pieces += [(prompt[len(text) :], False), (done[len(prompt) : end], True)]
        text = done[:end]
    return [*samples, _tokenize(pieces, tokenizer)]


def _render(tokenizer: Any, messages: Sequence[Any], tools: Any, *, prompt: bool) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt
        )
    except Exception as error:  # a template is a program of its author's: it may raise anything
        raise UsageError(f"the chat template refuses these messages: {error}") from error


def _end_of_turn(text: str, start: int, stop_tokens: Sequence[str]) -> int:
    ends = [at + len(token) for token in stop_tokens if (at := text.rfind(token, start)) >= 0]
    return max(ends, default=len(text))


def _tokenize(pieces: Sequence[tuple[str, bool]], tokenizer: Any) -> ChatSample:
    ids: list[int] = []
    mask: list[bool] = []
    for text, trained in pieces:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        mask += [trained] * len(piece)
    return ChatSample(token_ids=np.array(ids, np.int32), loss_mask=np.array(mask, np.bool_))


def _read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The chat data {path} cannot be read: {error}") from error
    found = [(n, _parse(line, f"{path}:{n}")) for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f"The chat data {path} is empty.")
    return found


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON: {error}") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise UsageError(f'{where}: expected {{"messages": [{{"role": ..., "content": ...}}, ...]}}')
    if len(messages) < 2 or not any(m["role"] == "assistant" for m in messages[1:]):
        raise UsageError(f"{where}: no assistant message after a first message: nothing to learn")
    return value
