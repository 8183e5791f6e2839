"""Conversion of sequences to the JSON replies of OpenAI's and vLLM's routes, streamed or not."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, cast

from buckeye.chat.messages import ToolChoice
from buckeye.chat.openai_api import (
    ChatRequest,
    GenerateRequest,
    TextRequest,
    chat_delta,
    chat_logprobs,
    chat_message,
    completion_logprobs,
    finite_logprob,
    generate_logprobs,
    usage_fields,
)
from buckeye.errors import InferenceError
from buckeye.inference.engine.detokenizer import IncrementalDetokenizer
from buckeye.inference.engine.sequences import Sequence
from buckeye.inference.render import Conversation
from buckeye.inference.render.renderer import ReplyStart
from buckeye.inference.server.service import Service
from buckeye.inference.server.streaming_reply import ReplyPart, StreamingReplyParser
from buckeye.inference.types import FinishReason, SampledArrays, VersionSpan, sampled_arrays


class Choice:
    """One sequence of a request, with its text. `decode` converts token ids to text."""

    def __init__(
        self,
        service: Service,
        index: int,
        sequence: Sequence,
        decode: Callable[[Seq[int]], str],
        stops: Seq[str],
    ) -> None:
        self.index = index
        self.sequence = sequence
        self.text = IncrementalDetokenizer(decode, stops)
        self.finish_reason: str | None = None
        """Reason for the end of the sequence; None while the sequence is running."""
        self.text_offset = 0
        """Number of characters of the tokens whose log-probs were reported."""
        self._service = service
        self._seen = 0

    def advance(self) -> tuple[int, int]:
        """Process the tokens that are new since the last call. Return their start and end index.

        If the text contains a stop string, end the sequence. Raise `InferenceError` if the engine failed.
        """
        # Read the reason before the tokens. The engine sets it after the last token, so no token is missed.
        reason = self.sequence.finish_reason
        if self.sequence.error is not None:
            raise InferenceError(self.sequence.error)
        start, end = self._seen, len(self.sequence.logprobs)
        stop_ids = self.sequence.params.stop_token_ids
        self.text.feed([token for token in self.sequence.token_ids[start:end] if token not in stop_ids])
        if self.text.stopped:
            end = min(end, self.text.num_tokens)
            if reason is None:
                self._service.engine.abort([self.sequence])
            reason = "stop"
        elif reason is not None:
            self.text.finish()
        self._seen = end
        self.finish_reason = reason
        return start, end

    @property
    def token_ids(self) -> list[int]:
        """Tokens that `advance` has processed."""
        return self.sequence.token_ids[: self._seen]

    def sampled(self, start: int, end: int) -> Iterable[tuple[int, float, Seq[tuple[int, float]]]]:
        """Return (token, log-prob, most likely tokens with log-probs) for the tokens `start` to `end` - 1."""
        sequence = self.sequence
        best = sequence.top_logprobs[start:end] or [[]] * (end - start)
        return zip(sequence.token_ids[start:end], sequence.logprobs[start:end], best, strict=True)

    def weight_versions(self) -> list[VersionSpan]:
        """Return the spans of processed tokens that one policy version sampled, with their version."""
        return [
            VersionSpan(str(version), start, min(end, self._seen))
            for version, start, end in self.sequence.version_spans()
            if start < self._seen
        ]

    def arrays(self) -> SampledArrays:
        """Return the processed tokens as arrays."""
        logprobs, reason = self.sequence.logprobs[: self._seen], cast(FinishReason, self.finish_reason)
        return sampled_arrays(self.token_ids, logprobs, self.weight_versions(), reason)


class ReplyFormat(ABC):
    """Base of the reply formats. It builds the JSON of a whole reply, and of the events of a stream."""

    id_prefix: str
    object_name: str
    part_name: str
    may_be_arrays = False
    """True if arrays of token ids and log-probs can be the whole reply."""

    def __init__(
        self,
        service: Service,
        body: GenerateRequest | TextRequest,
        prompts: list[list[int]],
        *,
        top_logprobs: int | None,
    ) -> None:
        self.is_named = body.request_id is not None
        """True if the client chose the `request_id`, so that later requests can name this one."""
        self.request_id = body.request_id or f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.with_usage = body.stream_options is not None and body.stream_options.include_usage
        """True if the last event of a stream has the number of tokens (`usage`)."""
        self.top_logprobs = top_logprobs
        """Number of most likely tokens to return with each log-prob; None returns no log-probs at all."""
        self.prompts = prompts
        self._with_token_ids = self._with_versions = True
        if isinstance(body, TextRequest):
            self._with_token_ids = bool(body.return_token_ids)
            self._with_versions = bool(body.return_weight_versions)
        self._service = service
        self._created = int(time.time())

    @property
    def has_arrays(self) -> bool:
        """True if arrays have all that the request asks for, except text."""
        has_columns = self._with_token_ids and self._with_versions and self.top_logprobs == 0
        return self.may_be_arrays and has_columns

    def decode(self, ids: Seq[int]) -> str:
        """Return the text of tokens."""
        return self._service.decode(ids)

    def full_reply(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the reply of a request that does not stream."""
        contents = [
            self._choice(choice, self._content(choice), 0, len(choice.token_ids)) for choice in choices
        ]
        fields = {"choices": contents, "usage": self._usage(choices)}
        return {**self._head(self.object_name), **self._top_fields(), **fields}

    def reply_start(self, choice: Choice) -> dict[str, Any] | None:
        """Return the event before the first token of a choice, or None."""
        return None

    def token_event(self, choice: Choice, start: int, end: int) -> dict[str, Any] | None:
        """Return an event with the new text and the tokens `start` to `end` - 1, or None if it is empty."""
        content, has_content = self._part_content(choice)
        with_tokens = end > start and (self.top_logprobs is not None or self._with_token_ids)
        if not (has_content or with_tokens or choice.finish_reason is not None):
            return None
        return self._event([self._choice(choice, content, start, end)])

    def usage_event(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the last event of a stream, with the number of tokens."""
        return self._event([]) | {"usage": self._usage(choices)}

    def _event(self, contents: list[dict[str, Any]]) -> dict[str, Any]:
        event = {**self._head(self.part_name), "choices": contents}
        return event | {"usage": None} if self.with_usage else event

    def _head(self, name: str) -> dict[str, Any]:
        model = self._service.model_name
        return {"id": self.request_id, "object": name, "created": self._created, "model": model}

    def _choice(self, choice: Choice, content: dict[str, Any], start: int, end: int) -> dict[str, Any]:
        content |= {"index": choice.index, "finish_reason": self._finish_reason(choice), "stop_reason": None}
        content["logprobs"] = None if self.top_logprobs is None else self._logprobs(choice, start, end)
        if self._with_token_ids:
            content["token_ids"] = choice.token_ids[start:end]
        if self._with_versions and choice.finish_reason is not None:
            content["weight_versions"] = choice.weight_versions()
        return content

    def _usage(self, choices: list[Choice]) -> dict[str, int]:
        prompt_tokens = sum(map(len, self.prompts))
        completion_tokens = sum(len(choice.token_ids) for choice in choices)
        return usage_fields(prompt_tokens, completion_tokens)

    def _top_fields(self) -> dict[str, Any]:
        return {}

    def _finish_reason(self, choice: Choice) -> str | None:
        return choice.finish_reason

    @abstractmethod
    def _content(self, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def _part_content(self, choice: Choice) -> tuple[dict[str, Any], bool]:
        """Return the content of an event, and True if it has text, reasoning or calls."""

    @abstractmethod
    def _logprobs(self, choice: Choice, start: int, end: int) -> dict[str, Any]: ...


class TokenFormat(ReplyFormat):
    """Reply of /inference/v1/generate: token ids without text."""

    id_prefix = object_name = part_name = "generate"
    may_be_arrays = True

    def decode(self, ids: Seq[int]) -> str:
        """Return an empty text, because this route needs no tokenizer."""
        return ""

    def _head(self, name: str) -> dict[str, Any]:
        return {"request_id": self.request_id}

    def _content(self, choice: Choice) -> dict[str, Any]:
        return {}

    def _part_content(self, choice: Choice) -> tuple[dict[str, Any], bool]:
        return {}, False

    def _logprobs(self, choice: Choice, start: int, end: int) -> dict[str, Any]:
        return generate_logprobs(choice.sampled(start, end))


class CompletionFormat(ReplyFormat):
    """Reply of /v1/completions."""

    id_prefix, object_name, part_name = "cmpl", "text_completion", "text_completion"
    prompt_logprobs: Mapping[tuple[int, ...], list[float]] | None = None
    """By prompt: the log-probs of its tokens after the first one. None: do not return them."""

    @property
    def may_be_arrays(self) -> bool:  # type: ignore[override]
        """True if the request asks for no log-probs of the prompt."""
        return self.prompt_logprobs is None

    def _content(self, choice: Choice) -> dict[str, Any]:
        content: dict[str, Any] = {"text": choice.text.text}
        if self.prompt_logprobs is not None:
            ids = choice.sequence.prompt_ids
            values = zip(ids[1:], self.prompt_logprobs[ids], strict=True)
            content["prompt_logprobs"] = [
                None,
                *({str(token): {"logprob": finite_logprob(value)}} for token, value in values),
            ]
        if self._with_token_ids:
            content["prompt_token_ids"] = choice.sequence.prompt_ids
        return content

    def _part_content(self, choice: Choice) -> tuple[dict[str, Any], bool]:
        text = choice.text.take(final=choice.finish_reason is not None)
        return {"text": text}, bool(text)

    def _logprobs(self, choice: Choice, start: int, end: int) -> dict[str, Any]:
        text, sampled = self._service.token_text, list(choice.sampled(start, end))
        texts, offset = [text(token) for token, _, _ in sampled], choice.text_offset
        choice.text_offset += sum(map(len, texts))
        best = [self._most_likely(*entry) for entry in sampled] if self.top_logprobs else None
        return completion_logprobs(texts, [logprob for _, logprob, _ in sampled], best, offset=offset)

    def _most_likely(self, token: int, logprob: float, best: Seq[tuple[int, float]]) -> dict[str, float]:
        """Return the log-probs of the most likely tokens and of the sampled token, by text of the token."""
        text = self._service.token_text
        return {text(other): finite_logprob(value) for other, value in best} | {text(token): logprob}


class ChatCompletionFormat(ReplyFormat):
    """Reply of /v1/chat/completions."""

    id_prefix, object_name, part_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, service: Service, body: ChatRequest, conversation: Conversation, reply_start: ReplyStart
    ) -> None:
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        prompt = [*conversation.ids, *reply_start.ids]
        super().__init__(service, body, [prompt], top_logprobs=top_logprobs)
        self._tool_is_named = isinstance(body.tool_choice, ToolChoice)
        self._replies = [
            StreamingReplyParser(
                service.renderer,
                conversation,
                reply_start=reply_start,
                first_call_only=body.parallel_tool_calls is False or self._tool_is_named,
            )
            for _ in range(body.n or 1)
        ]
        self._with_calls: set[int] = set()
        """Indices of choices that end in tool calls."""

    def reply_start(self, choice: Choice) -> dict[str, Any]:
        """Return the first event of a choice, which has the role of the message."""
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": choice.index, "delta": delta, "finish_reason": None, "logprobs": None}])

    def _top_fields(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[0]} if self._with_token_ids else {}

    def _finish_reason(self, choice: Choice) -> str | None:
        # If the request names the function to call, OpenAI's API reports "stop" instead of "tool_calls".
        called = (
            choice.finish_reason == "stop" and choice.index in self._with_calls and not self._tool_is_named
        )
        return "tool_calls" if called else choice.finish_reason

    def _content(self, choice: Choice) -> dict[str, Any]:
        reply = self._new_part(choice)
        return {"message": chat_message(reply.content, reply.reasoning, reply.calls)}

    def _part_content(self, choice: Choice) -> tuple[dict[str, Any], bool]:
        part = self._new_part(choice)
        return {"delta": chat_delta(part.content, part.reasoning, part.calls)}, bool(part)

    def _new_part(self, choice: Choice) -> ReplyPart:
        """Return the part of a reply that is new since the last call, and that later tokens cannot change."""
        reply = self._replies[choice.index]
        if choice.finish_reason is None:
            return reply.feed(choice.text.take())
        cut = choice.text.text if choice.text.stopped else None
        part = reply.finish(choice.text.take(final=True), choice.token_ids, cut=cut)
        if part.calls:
            self._with_calls.add(choice.index)
        return part

    def _logprobs(self, choice: Choice, start: int, end: int) -> dict[str, Any]:
        text = self._service.token_text
        return chat_logprobs(
            (text(token), logprob, [(text(other), value) for other, value in best])
            for token, logprob, best in choice.sampled(start, end)
        )
