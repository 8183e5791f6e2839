"""Conversion of sequences to the JSON of OpenAI's completions and chat completions, whole or streamed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import Any

from buckeye.chat.messages import ToolChoice
from buckeye.chat.openai_api import (
    ChatRequest,
    TextRequest,
    chat_delta,
    chat_logprobs,
    chat_message,
    completion_logprobs,
    finite_logprob,
    usage_fields,
)
from buckeye.errors import InferenceError
from buckeye.inference.engine.detokenizer import IncrementalDetokenizer
from buckeye.inference.engine.sequences import Sequence
from buckeye.inference.render import Conversation
from buckeye.inference.render.renderer import ReplyStart
from buckeye.inference.server.service import Service
from buckeye.inference.server.streaming_reply import ReplyPart, StreamingReplyParser


class Choice:
    """One sequence of a request, and its text."""

    def __init__(self, service: Service, index: int, sequence: Sequence, stops: Seq[str]) -> None:
        self.index = index
        self.sequence = sequence
        self.text = IncrementalDetokenizer(service.decode, stops)
        self.finish_reason: str | None = None
        """Finish reason; None while the sequence runs."""
        self.text_offset = 0
        """Number of characters of the tokens with reported offsets."""
        self._service = service
        self._seen = 0

    def advance(self) -> tuple[int, int]:
        """Process the tokens since the last call and return their range.

        A stop string in their text ends the sequence.
        """
        reason = self.sequence.finish_reason  # read before the tokens: the engine writes it after them
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
        """Processed tokens."""
        return self.sequence.token_ids[: self._seen]

    @property
    def logprobs(self) -> list[float]:
        """Log-probs of the processed tokens."""
        return self.sequence.logprobs[: self._seen]

    def top_logprobs(self, start: int, end: int) -> Seq[Seq[tuple[int, float]]]:
        """Return the most likely tokens at positions start..end, as many as requested."""
        return self.sequence.top_logprobs[start:end] or [()] * (end - start)

    def raise_error(self) -> None:
        """Raise `InferenceError` if the engine failed this sequence."""
        if self.sequence.error is not None:
            raise InferenceError(self.sequence.error)

    def weight_versions(self) -> list[dict[str, Any]]:
        """Return the spans of tokens by policy version."""
        return [
            {"version": str(version), "start": start, "end": min(end, self._seen)}
            for version, start, end in self.sequence.version_spans()
            if start < self._seen
        ]


class ReplyFormat(ABC):
    """JSON reply of a request, whole or streamed."""

    id_prefix: str
    object_name: str
    part_name: str

    def __init__(
        self, service: Service, body: TextRequest, prompts: list[list[int]], *, top_logprobs: int | None
    ) -> None:
        self.top_logprobs = top_logprobs
        """Number of log-probs returned in addition to each token's own; None returns no log-probs."""
        self._service = service
        self._body = body
        self.prompts = prompts

    def begin(self, request_id: str, choices: list[Choice]) -> None:
        """Set the fields that all events share."""
        self._head = {"id": request_id, "created": int(time.time()), "model": self._service.model_name}

    def full_reply(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the reply of a request that does not stream."""
        return {
            **self._head,
            "object": self.object_name,
            **self._top_fields(),
            "choices": [self._choice(choice) for choice in choices],
            "usage": self._usage(choices),
        }

    def reply_start(self, choice: Choice) -> dict[str, Any] | None:
        """Return the event before the first token of a choice, or None."""
        return None

    def token_event(self, choice: Choice, start: int, end: int) -> dict[str, Any] | None:
        """Return one event: new text, and the tokens start..end. None if there is nothing to send yet."""
        content, has_content = self._part_content(choice)
        with_tokens = end > start and (self.top_logprobs is not None or bool(self._body.return_token_ids))
        if not (has_content or with_tokens or choice.finish_reason is not None):
            return None
        content |= {"index": choice.index, "finish_reason": self._finish_reason(choice)}
        content["logprobs"] = self._logprobs(choice, start, end)
        if self._body.return_token_ids:
            content["token_ids"] = choice.token_ids[start:end]
        return self._event([content])

    def usage_event(self, choices: list[Choice]) -> dict[str, Any]:
        """Return the usage event."""
        return self._event([]) | {"usage": self._usage(choices)}

    def _event(self, contents: list[dict[str, Any]]) -> dict[str, Any]:
        event = {**self._head, "object": self.part_name, "choices": contents}
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            event["usage"] = None
        return event

    def _choice(self, choice: Choice) -> dict[str, Any]:
        content = self._content(choice) | {
            "index": choice.index,
            "finish_reason": self._finish_reason(choice),
            "stop_reason": None,
            "logprobs": self._logprobs(choice, 0, len(choice.token_ids)),
        }
        if self._body.return_token_ids:
            content["token_ids"] = choice.token_ids
        if self._body.return_weight_versions:
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
        """Return the content of an event, and whether it has any text or call."""

    @abstractmethod
    def _logprobs(self, choice: Choice, start: int, end: int) -> dict[str, Any] | None: ...


class CompletionFormat(ReplyFormat):
    """Reply of /v1/completions."""

    id_prefix, object_name, part_name = "cmpl", "text_completion", "text_completion"

    def _content(self, choice: Choice) -> dict[str, Any]:
        content: dict[str, Any] = {"text": choice.text.text}
        if self._body.return_token_ids:
            content["prompt_token_ids"] = choice.sequence.prompt_ids
        return content

    def _part_content(self, choice: Choice) -> tuple[dict[str, Any], bool]:
        text = choice.text.take(final=choice.finish_reason is not None)
        return {"text": text}, bool(text)

    def _logprobs(self, choice: Choice, start: int, end: int) -> dict[str, Any] | None:
        if self.top_logprobs is None:
            return None
        texts = [self._service.token_text(token) for token in choice.token_ids[start:end]]
        logprobs, offset = choice.logprobs[start:end], choice.text_offset
        choice.text_offset += sum(map(len, texts))
        entries = zip(texts, logprobs, choice.top_logprobs(start, end), strict=True)
        best = [self._most_likely(*entry) for entry in entries] if self.top_logprobs else None
        return completion_logprobs(texts, logprobs, best, offset=offset)

    def _most_likely(self, text: str, logprob: float, best: Seq[tuple[int, float]]) -> dict[str, float]:
        """Return the most likely tokens by text, plus the sampled one, which need not be among them."""
        return {self._service.token_text(token): finite_logprob(value) for token, value in best} | {
            text: logprob
        }


class ChatCompletionFormat(ReplyFormat):
    """Reply of /v1/chat/completions."""

    id_prefix, object_name, part_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, service: Service, body: ChatRequest, conversation: Conversation, reply_start: ReplyStart
    ) -> None:
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        prompt = [*conversation.ids, *reply_start.ids]
        super().__init__(service, body, [prompt], top_logprobs=top_logprobs)
        self._conversation = conversation
        self._reply_start = reply_start
        self._tool_is_named = isinstance(body.tool_choice, ToolChoice)
        self._first_call_only = body.parallel_tool_calls is False or self._tool_is_named
        self._with_calls: set[int] = set()
        """Indices of choices that end in tool calls."""

    def begin(self, request_id: str, choices: list[Choice]) -> None:
        """Set the shared fields, and start parsing the replies."""
        super().begin(request_id, choices)
        self._replies = [
            StreamingReplyParser(
                self._service.renderer,
                self._conversation,
                reply_start=self._reply_start,
                first_call_only=self._first_call_only,
            )
            for _ in choices
        ]

    def reply_start(self, choice: Choice) -> dict[str, Any]:
        """Return the event with the role."""
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": choice.index, "delta": delta, "finish_reason": None, "logprobs": None}])

    def _top_fields(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[0]} if self._body.return_token_ids else {}

    def _finish_reason(self, choice: Choice) -> str | None:
        # for a named function the whole reply is a call, and OpenAI's API reports "stop"
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
        """Return the part of a reply that became certain since the last call."""
        reply = self._replies[choice.index]
        if choice.finish_reason is None:
            return reply.feed(choice.text.take())
        cut = choice.text.text if choice.text.stopped else None
        part = reply.finish(choice.text.take(final=True), choice.token_ids, cut=cut)
        if part.calls:
            self._with_calls.add(choice.index)
        return part

    def _logprobs(self, choice: Choice, start: int, end: int) -> dict[str, Any] | None:
        if self.top_logprobs is None:
            return None
        text = self._service.token_text
        best = choice.top_logprobs(start, end)
        sampled = zip(choice.token_ids[start:end], choice.logprobs[start:end], best, strict=True)
        return chat_logprobs(
            (text(token), logprob, [(text(other), value) for other, value in likely])
            for token, logprob, likely in sampled
        )
