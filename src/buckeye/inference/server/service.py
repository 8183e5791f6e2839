"""State that all routes share, checks of requests, and conversion of requests to sequences of the engine."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Seq
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

from buckeye.chat.messages import ChatMessage
from buckeye.chat.openai_api import InvalidRequestError, Sampling
from buckeye.envs.base import Tool
from buckeye.inference.access import short_model_name
from buckeye.inference.engine.engine import Engine
from buckeye.inference.engine.sequences import Sequence
from buckeye.inference.render import ChatRenderer, Conversation
from buckeye.inference.render.control_tokens import REPLY_TOKENS
from buckeye.inference.types import KeptPrompts, SamplingParams

DEFAULT_MAX_TOKENS = 16
"""Default of `max_tokens` in requests for completions and for token ids, as in OpenAI's API."""
_MIN_TEMPERATURE = 0.01
_MAX_SEQUENCES = 16384
_MAX_WAITING = 16384
_RETRY_SECONDS = 1


class Service:
    """State that all routes share: the engine, names of model and adapter, and open requests.

    `seed` starts the sequence of random seeds for requests without a seed.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model_name: str,
        directory: Path,
        weights_dir: Path,
        renderer: ChatRenderer | None,
        seed: int | None,
    ) -> None:
        self.engine = engine
        self.model_name = model_name
        self.dtype = str(engine.decoder.cache.dtype).removeprefix("torch.")
        self.checksum: str | None = None
        """Checksum of the current weights or adapter; None before the first update."""
        self.directory = directory
        """Directory of the model that the server was started with. Adapters are applied to this model."""
        self.weights_dir = weights_dir
        """Folder that new weights and adapters must be in."""
        self.adapter: str | None = None
        """Name of the LoRA adapter applied to the current weights."""
        self.spec = engine.decoder.spec
        self.max_len = engine.decoder.cache.max_len
        self.created = int(time.time())
        self.requests: dict[str, Seq[Sequence]] = {}
        self.kept_prompts = KeptPrompts()
        self.draining = False
        """True during shutdown. Running requests may finish, and new ones are refused."""
        self.unfinished = 0
        """Number of sequences of open requests, waiting or running."""
        self._renderer = renderer
        self._seeds = random.Random(seed)  # noqa: S311, not used for secrets

    @property
    def renderer(self) -> ChatRenderer:
        """Renderer with the tokenizer. Raises `InvalidRequestError` if the model has no tokenizer."""
        self.require_text()
        assert self._renderer is not None
        return self._renderer

    def require_text(self) -> None:
        """Raise `InvalidRequestError` if the model has no tokenizer."""
        if self._renderer is None:
            raise InvalidRequestError(
                "this model has no tokenizer", hint="send token ids to /inference/v1/generate"
            )

    def decode(self, ids: Seq[int]) -> str:
        """Return the text of tokens without special tokens, or an empty text without a tokenizer."""
        if self._renderer is None:
            return ""
        return self._renderer.decode([token for token in ids if token not in self._hidden])

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, or `token_id:<id>` without a tokenizer."""
        return self._renderer.token_text(token_id) if self._renderer else f"token_id:{token_id}"

    def prompts(self, prompt: str | list[Any]) -> list[list[int]]:
        """Return the token ids of every prompt of a completion request."""
        if isinstance(prompt, str):
            return [self.encode(prompt)]
        if not prompt:
            raise InvalidRequestError("Bad request: `prompt` is empty")
        kind: Any = {str: list[str], list: list[list[int]], int: list[int]}.get(type(prompt[0]))
        try:
            prompts = msgspec.convert(prompt, kind)
        except (msgspec.ValidationError, TypeError) as error:
            raise InvalidRequestError(
                "Bad request: `prompt` must be a text, token ids, or a list of texts or of token id lists"
            ) from error
        if isinstance(prompt[0], str):
            return [self.encode(text) for text in prompts]
        return prompts if isinstance(prompt[0], list) else [prompts]

    def conversation(self, messages: Seq[ChatMessage], tools: Seq[Tool]) -> Conversation:
        """Return the prompt of a chat. Raise `UsageError` if the chat template rejects the messages."""
        return self.renderer.render(self.plain_messages(messages), tools)

    def plain_messages(self, messages: Seq[ChatMessage]) -> list[dict[str, Any]]:
        """Return messages as the dictionaries that chat templates read.

        Raise `InvalidRequestError` if the messages have too many characters for the context.
        """
        plain = [message.to_template_message() for message in messages]
        self._check_characters(sum(len(message["content"]) for message in plain))
        return plain

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text.

        With `special`, include the tokens that the tokenizer adds, such as a beginning-of-text token.
        """
        self._check_characters(len(text))
        return self.renderer.tokenizer.encode(text, add_special_tokens=special)

    def check_ids(self, ids: Seq[int]) -> None:
        """Raise `InvalidRequestError` for token ids outside the vocabulary."""
        if ids and (min(ids) < 0 or max(ids) >= self.spec.vocab_size):
            raise InvalidRequestError(f"a token id is outside the vocabulary of {self.spec.vocab_size}")

    def _check_characters(self, count: int) -> None:
        """Reject a text that is too long for the context. Tokenizing such a text may take seconds."""
        if count > self.max_len * self._longest_token:
            raise InvalidRequestError(
                f"the prompt has {count} characters; the context is {self.max_len} tokens of at most "
                f"{self._longest_token} characters each",
                code="BK-PROMPT-TOO-LONG",
            )

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.renderer.tokenizer.get_vocab()))

    @cached_property
    def _hidden(self) -> frozenset[int]:
        """Ids of the special tokens that replies do not show.

        Replies show `REPLY_TOKENS`, although they are special tokens in some models.
        """
        added_tokens = self.renderer.tokenizer.added_tokens_decoder
        return frozenset(
            token
            for token, added in added_tokens.items()
            if added.special and added.content not in REPLY_TOKENS
        )

    def admit(self, request_id: str, sequences: Seq[Sequence]) -> None:
        """Raise an error if the server cannot accept a request with these sequences.

        Raise `HTTPException` 503 during shutdown, `HTTPException` 429 if too many sequences are waiting, and
        `InvalidRequestError` if another request uses the id.
        """
        retry = {"Retry-After": str(_RETRY_SECONDS)}
        if self.draining:
            raise HTTPException(503, "the server is shutting down", headers=retry)
        if self.unfinished and self.unfinished + len(sequences) > self.engine.running.slots + _MAX_WAITING:
            message = f"{self.unfinished} sequences are waiting or running; retry later"
            raise HTTPException(429, message, headers=retry)
        if request_id in self.requests:
            raise InvalidRequestError(f"a request with `request_id` = {request_id!r} is already running")

    def sequences(
        self,
        prompts: Seq[Seq[int]],
        sampling: Sampling,
        *,
        max_tokens: int,
        streamed: bool,
        top_logprobs: int | None,
    ) -> list[Sequence]:
        """Return `sampling.n` sequences for each prompt, with consecutive seeds.

        Raise `InvalidRequestError` for invalid settings.
        """
        count = sampling.n or 1
        if len(prompts) * count > _MAX_SEQUENCES:
            raise InvalidRequestError(
                f"the request is for {len(prompts) * count} sequences; the limit is {_MAX_SEQUENCES}"
            )
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        stop_token_ids = self._stop_token_ids(sampling)
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        if 0 < temperature < _MIN_TEMPERATURE:
            raise InvalidRequestError(f"`temperature` must be 0 (greedy) or at least {_MIN_TEMPERATURE}")
        if max_tokens > self.max_len:
            raise InvalidRequestError(
                f"`max_tokens` is {max_tokens}, but the context for prompt and reply is {self.max_len} tokens"
            )
        if sampling.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"`min_tokens` is {sampling.min_tokens}, more than `max_tokens` = {max_tokens}"
            )
        sequences = []
        for index, prompt in enumerate(prompts):
            ids = self.checked_prompt(prompt)
            for member in range(count):
                params = SamplingParams(
                    max_tokens=max_tokens,
                    temperature=temperature,
                    top_p=1.0 if sampling.top_p is None else sampling.top_p,
                    top_k=sampling.top_k or -1,
                    seed=seed + index * count + member,
                    min_tokens=sampling.min_tokens,
                    stop_token_ids=stop_token_ids,
                    top_logprobs=top_logprobs or 0,
                )
                sequences.append(Sequence(ids, params, streamed=streamed))
        return sequences

    @property
    def short_model_name(self) -> str:
        """Name of the adapter, or of the model if no adapter is loaded, without its folder."""
        return short_model_name(self.adapter or self.model_name)

    def check_model(self, name: str | None) -> None:
        """Raise `HTTPException` 404 unless `name` is the model, its adapter, its short name, or None."""
        if name not in (None, self.model_name, self.short_model_name, self.adapter):
            message = f"no model named {name!r}: this server serves {self.short_model_name!r}"
            raise HTTPException(404, message)

    def _stop_token_ids(self, sampling: Sampling) -> tuple[int, ...]:
        requested = sampling.stop_token_ids or []
        if any(token >= self.spec.vocab_size for token in requested):
            raise InvalidRequestError(
                f"`stop_token_ids` has an id outside the vocabulary of {self.spec.vocab_size}"
            )
        eos = () if sampling.ignore_eos else self._eos_token_ids
        return tuple(dict.fromkeys((*requested, *eos)))

    @cached_property
    def _eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply: those of the model, of its tokenizer and of its chat template."""
        others = () if self._renderer is None else self._renderer.stop_token_ids
        tokens = dict.fromkeys((*self.spec.eos_token_ids, *others))
        return tuple(token for token in tokens if token < self.spec.vocab_size)

    def checked_prompt(self, prompt: Seq[int]) -> tuple[int, ...]:
        """Return the prompt. Raise `InvalidRequestError` if it is empty, too long, or has unknown ids."""
        if not prompt:
            raise InvalidRequestError("the prompt has no tokens")
        if len(prompt) >= self.max_len:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens; the context is {self.max_len}, so at most "
                f"{self.max_len - 1} fit",
                code="BK-PROMPT-TOO-LONG",
            )
        self.check_ids(prompt)
        return tuple(prompt)
