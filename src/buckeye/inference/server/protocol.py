"""Types of the HTTP requests that control the inference server, or convert tokens. The names are vLLM's."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from buckeye.chat.messages import ChatMessage
from buckeye.chat.openai_api import GenerateRequest, TokenIds, Tools, check_conversation
from buckeye.inference.types import Prefix
from buckeye.transport.weights import WeightsManifest


class TurnRequest(GenerateRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /inference/v1/generate. With `prefix`, `token_ids` are the tokens of the prompt after it."""

    prefix: Prefix | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a text in `prompt`, or a chat in `messages`."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: Tools | None = None
    model: str | None = None
    add_special_tokens: bool = True
    """Add the special tokens of the tokenizer to `prompt`. For `messages`, the chat template adds them."""
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either `prompt` or `messages`")
        if self.messages is not None:
            check_conversation(self.messages, self.tools)
        elif self.tools:
            raise ValueError("`tools` requires `messages`")


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: TokenIds
    model: str | None = None


class BroadcastInfo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Place of this server in a group that receives new weights: `rank` of `size` processes.

    The group meets in the file `store`, on one host if `loopback`. `manifest` and `sizes` describe the files
    that arrive within `seconds`, or that the trainer shares at the paths `shared`.
    """

    store: str
    rank: int
    size: int
    loopback: bool
    seconds: float
    manifest: WeightsManifest
    sizes: dict[str, int]
    shared: dict[str, str]


class UpdateInfo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Location of new weights: a published weights directory. With `broadcast`, they arrive in memory."""

    path: str
    broadcast: BroadcastInfo | None = None


class UpdateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /update_weights."""

    update_info: UpdateInfo


class FinishUpdateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /finish_weight_update.

    With `keep_kv_cache`, running requests keep the keys and values that the old weights have computed.
    """

    weight_version: str | int | None = None
    keep_kv_cache: bool = False


class WeightVersionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /update_weight_version."""

    new_version: str | int


class RpcRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /collective_rpc."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /abort_requests. Without `request_ids`, all requests are aborted."""

    request_ids: list[str] | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter.

    `lora_path` is a directory in peft's format. Requests use `lora_name` as the name of the model. With
    `load_inplace`, the adapter replaces a loaded adapter with this name. With `keep_kv_cache`, running
    requests keep the keys and values that the old weights have computed.
    """

    lora_name: Annotated[str, Meta(min_length=1)]
    lora_path: Annotated[str, Meta(min_length=1)]
    load_inplace: bool = False
    keep_kv_cache: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
