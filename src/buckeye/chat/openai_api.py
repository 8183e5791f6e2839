"""Requests and replies of OpenAI's API, and vLLM's additions to this API, as types.

A request with an unknown field is invalid. A field that this server does not support must have a value
without effect, such as `presence_penalty` 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from buckeye.base.storage import parse_json
from buckeye.chat.messages import ChatMessage, ToolChoice, tools_problem
from buckeye.errors import UsageError

TokenIds = list[Annotated[int, Meta(ge=0)]]
Count = Annotated[int, Meta(ge=1, le=1024)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
MaxTokens = Annotated[int, Meta(ge=1)]
MinTokens = Annotated[int, Meta(ge=0)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Stops = Annotated[list[str], Meta(max_length=64)]
StopTokenIds = Annotated[TokenIds, Meta(max_length=256)]
Tools = Annotated[
    list[dict[str, Any]], Meta(extra_json_schema={"items": {"$ref": "#/components/schemas/Tool"}})
]
"""Validated tools in the client's key order, because chat templates render the keys in this order."""

PLAIN_TEXT_VALUES: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}
"""Fields that can change the kind of reply, each with the values that request plain text."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **PLAIN_TEXT_VALUES,
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_p": (0,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Fields with the values that have no effect.

If the type of a request does not have such a field, the request may only set one of these values or null.
"""

IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Unsupported fields that are valid with any value, because they never change the reply."""

_MIN_LOGPROB = -9999.0
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable_error",
}


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling fields that generate, completion and chat requests share."""

    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens = 0
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    n: Count | None = None
    seed: Seed | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool = False


class GenerateSampling(Sampling, kw_only=True, forbid_unknown_fields=True):
    """Field `sampling_params` of /inference/v1/generate.

    `logprobs` is the number of alternatives per token. None: return no log-probs.
    """

    logprobs: TopLogprobs | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Field `stream_options` of a streaming request."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Has no effect, because this server obfuscates nothing."""


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /inference/v1/generate: the prompt and the reply are token ids."""

    token_ids: TokenIds
    sampling_params: GenerateSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    def __post_init__(self) -> None:
        _check_stream_options(self)


class TextRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """Fields that completion and chat requests share."""

    model: str | None = None
    request_id: str | None = None
    stop: str | Stops | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None

    def __post_init__(self) -> None:
        _check_stream_options(self)

    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings that are not empty."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)


class CompletionRequest(TextRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt` is a text, a list of token ids, or a list of several prompts.

    If one of several prompts is invalid, the whole request is invalid.
    """

    prompt: str | list[Any]
    logprobs: TopLogprobs | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None
    """0: also return the log-probs of the prompt's tokens, as vLLM does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("`prompt_logprobs` needs `stream`: false")


class ChatRequest(TextRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    tools: Tools | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_conversation(self.messages, self.tools)
        names = [tool["function"]["name"] for tool in self.tools or ()]
        if self.tool_choice == "required" and not names:
            raise ValueError("`tool_choice` is required, but `tools` is empty")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"`tool_choice` is {self.tool_choice.function.name!r}, which is not in `tools`")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs`: true")

    def offered_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call. The list is empty if `tool_choice` is "none"."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forces_a_call(self) -> bool:
        """True if the reply must be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)

    def forced_tool(self) -> str | None:
        """Return the tool of a forced call, or None if the model may choose the tool of this call."""
        if isinstance(self.tool_choice, ToolChoice):
            return self.tool_choice.function.name
        names = [str(tool["function"]["name"]) for tool in self.tools or ()]
        return names[0] if len(names) == 1 else None


RequestT = TypeVar("RequestT", bound=msgspec.Struct)


class InvalidRequestError(UsageError):
    """Request with an invalid or unsupported field."""

    code = "BK-INFERENCE-REQUEST"


def parse_request(body: bytes, kind: type[RequestT]) -> RequestT:
    """Parse a request from JSON. Raise `UsageError` that names an invalid field and its problem."""
    fields = decode_json(body)
    return convert_request(without_neutral(fields, kind) if isinstance(fields, dict) else fields, kind)


def decode_json(body: bytes) -> Any:
    """Return the value of a JSON body. Raise `UsageError` for invalid JSON."""
    try:
        return msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if b"\\ud" in body.lower():  # half a surrogate pair, which becomes U+FFFD
            with suppress(ValueError, RecursionError):
                return parse_json(body.decode())
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error


def convert_request(fields: Any, kind: type[RequestT]) -> RequestT:
    """Convert fields to a request. Raise `UsageError` that names an invalid field and its problem."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"Bad request: {error}") from error


def check_conversation(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raise `ValueError` for messages or tools that no template can render.

    `convert_request` reports this error as an `InvalidRequestError`.
    """
    if not messages:
        raise ValueError("`messages` is empty")
    if problem := tools_problem(tools or ()):
        raise ValueError(problem)


def without_neutral(fields: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields that have an effect. Raise `UsageError` if this server does not support a field."""
    kept = {}
    for name, value in fields.items():
        if name in kind.__struct_fields__:
            kept[name] = (
                without_neutral(value, GenerateSampling)
                if name == "sampling_params" and isinstance(value, dict)
                else value
            )
        elif name in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[name]:
                raise InvalidRequestError(f"`{name}` is not supported by this server", hint="leave it out")
        elif name not in IGNORED_FIELDS:
            kept[name] = value  # unknown, so `convert_request` rejects it
    return kept


def finite_logprob(logprob: float) -> float:
    """Return a log-prob that JSON can represent: at least -9999, which OpenAI uses for minus infinity."""
    return max(logprob, _MIN_LOGPROB)


def error_body(message: str, status_code: int, *, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's format.

    `code` is the code of a Buckeye error. The default is the HTTP status, as in vLLM.
    """
    kind = _ERROR_TYPES.get(status_code, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code or status_code}}


def reasoning_fields(text: str) -> dict[str, str]:
    """Return reasoning in the fields `reasoning_content` and `reasoning`, because clients read either."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def chat_message(content: str, reasoning: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the `message` of an entry of `choices` in a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    return message | reasoning_fields(reasoning) | ({"tool_calls": calls} if calls else {})


def chat_delta(
    content: str = "", reasoning: str = "", calls: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the `delta` of an event in a streamed chat completion."""
    numbered = [{"index": index, **call} for index, call in enumerate(calls)]
    fields = {"content": content} if content else {}
    return fields | reasoning_fields(reasoning) | ({"tool_calls": numbered} if calls else {})


def chat_logprobs(tokens: Iterable[tuple[str, float, Iterable[tuple[str, float]]]]) -> dict[str, Any]:
    """Return the `logprobs` of a chat completion.

    Each token is its text, its log-prob, and the texts and log-probs of its most likely alternatives.
    """

    def entry(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": finite_logprob(logprob), "bytes": list(text.encode())}

    content = [
        entry(text, logprob) | {"top_logprobs": [entry(*pair) for pair in best]}
        for text, logprob, best in tokens
    ]
    return {"content": content}


def generate_logprobs(tokens: Iterable[tuple[int, float, Iterable[tuple[int, float]]]]) -> dict[str, Any]:
    """Return the `logprobs` of the generate route: as `chat_logprobs`, with ids in place of texts.

    Clients of vLLM read `token`, clients of Buckeye's server read `token_id`.
    """

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": f"token_id:{token}", "token_id": token, "logprob": finite_logprob(logprob)}

    content = [
        entry(token, logprob) | {"top_logprobs": [entry(*pair) for pair in best]}
        for token, logprob, best in tokens
    ]
    return {"content": content}


def completion_logprobs(
    texts: Sequence[str],
    logprobs: Sequence[float],
    best: Sequence[Mapping[str, float]] | None = None,
    *,
    offset: int = 0,
) -> dict[str, Any]:
    """Return the `logprobs` of a completion. `offset` is the number of characters before the first token."""
    return {
        "tokens": texts,
        "token_logprobs": list(map(finite_logprob, logprobs)),
        "top_logprobs": best,
        "text_offset": list(accumulate(map(len, texts), initial=offset))[:-1],
    }


def usage_fields(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the `usage` of a reply."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _check_stream_options(request: GenerateRequest | TextRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise ValueError("`stream_options` needs `stream`: true")
