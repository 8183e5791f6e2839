"""The HTTP requests that the inference server takes, typed; the names are vLLM's, most of them OpenAI's.

A field that would change the result and is not supported is refused unless it has its neutral value; an
unknown field is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from buckeye.errors import UsageError
from buckeye.inference.messages import ChatMessage, ToolChoice, tools_problem

TokenIds = list[Annotated[int, Meta(ge=0)]]
Count = Annotated[int, Meta(ge=1, le=1024)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1)]
MaxTokens = Annotated[int, Meta(ge=1)]
MinTokens = Annotated[int, Meta(ge=0)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Stops = Annotated[list[str], Meta(max_length=64)]
StopTokenIds = Annotated[TokenIds, Meta(max_length=256)]
Tools = Annotated[
    list[dict[str, Any]], Meta(extra_json_schema={"items": {"$ref": "#/components/schemas/Tool"}})
]
"""Checked, and kept as they were sent: chat templates write them in the order of their keys."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Fields that are accepted with these values (or null) only, because they mean nothing then."""

_IGNORED = frozenset(
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
"""Fields that never change the result."""


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What all three ways to ask for tokens have in common."""

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
    """`sampling_params` of /inference/v1/generate. `logprobs` is how many are told beside each token's own,
    None for none at all."""

    logprobs: TopLogprobs | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`stream_options` of a streaming request."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and ignored: nothing is obfuscated."""


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /inference/v1/generate: token ids in, token ids out."""

    token_ids: TokenIds
    sampling_params: GenerateSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    def __post_init__(self) -> None:
        _check_stream_options(self)


class TextRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions have in common."""

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
        """The stop strings, empty ones left out."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)


class CompletionRequest(TextRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. A prompt is a text or token ids; a list of them is one wave."""

    prompt: str | list[Any]
    logprobs: TopLogprobs | None = None


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
        _check_conversation(self.messages, self.tools)
        names = [tool["function"]["name"] for tool in self.tools or ()]
        if self.tool_choice == "required" and not names:
            raise ValueError("`tool_choice` is required and there are no `tools`")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"`tool_choice` is {self.tool_choice.function.name!r}, which is none of `tools`")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` is for requests with `logprobs`: true")

    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is shown: none where `tool_choice` is none, so it cannot call any."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forces_a_call(self) -> bool:
        """Whether the reply must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)

    def forced_tool(self) -> str | None:
        """The tool that a forced call is of; None if the model may choose one."""
        if isinstance(self.tool_choice, ToolChoice):
            return self.tool_choice.function.name
        names = [str(tool["function"]["name"]) for tool in self.tools or ()]
        return names[0] if len(names) == 1 else None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a text as `prompt`, or `messages` as the chat template writes them."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: Tools | None = None
    model: str | None = None
    add_special_tokens: bool = True
    """Of a `prompt`; messages have those that the chat template writes."""
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either `prompt` or `messages`")
        if self.messages is not None:
            _check_conversation(self.messages, self.tools)
        elif self.tools:
            raise ValueError("`tools` go with `messages`")


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: TokenIds
    model: str | None = None


class UpdateInfo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where the new weights lie: a published weights directory."""

    path: str


class UpdateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /update_weights."""

    update_info: UpdateInfo


class FinishUpdateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /finish_weight_update."""

    weight_version: str | int | None = None


class WeightVersionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /update_weight_version."""

    new_version: str | int


class InitTransferRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /init_weight_transfer_engine. Weights that come as files need nothing agreed on before."""

    init_info: dict[str, Any] = {}


class RpcRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /collective_rpc."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /abort_requests; no ids means all."""

    request_ids: list[str] | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter: a directory in peft's format, and the name that requests give as their
    model. `load_inplace` lets it take the place of one of the same name."""

    lora_name: Annotated[str, Meta(min_length=1)]
    lora_path: Annotated[str, Meta(min_length=1)]
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


RequestT = TypeVar("RequestT", bound=msgspec.Struct)


def parse(body: bytes, kind: type[RequestT]) -> RequestT:
    """A request from its JSON. Raises `UsageError` that names the field and what is wrong with it."""
    try:
        fields = msgspec.json.decode(body or b"{}")
        if isinstance(fields, dict):
            fields = _without_neutral(fields, kind)
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"Bad request: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"The body is not valid JSON: {error}") from error


def _check_stream_options(request: GenerateRequest | TextRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise ValueError("`stream_options` is for requests with `stream`: true")


def _check_conversation(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raise ValueError, which the conversion turns into the answer."""
    if not messages:
        raise ValueError("`messages` is empty")
    if problem := tools_problem(tools or ()):
        raise ValueError(problem)


def _without_neutral(fields: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    kept = {}
    for name, value in fields.items():
        if name in kind.__struct_fields__:
            kept[name] = (
                _without_neutral(value, GenerateSampling)
                if name == "sampling_params" and isinstance(value, dict)
                else value
            )
        elif name in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[name]:
                raise UsageError(f"`{name}` is not supported by this server; leave it out.")
        elif name not in _IGNORED:
            kept[name] = value  # unknown: the conversion names it
    return kept
