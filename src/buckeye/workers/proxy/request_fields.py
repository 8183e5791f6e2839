"""Request settings that a policy in training ignores, because the run decides how to sample.

The proxy drops and counts these settings, and logs each of them once per environment. It refuses settings
that change the meaning of the reply, such as a required format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from buckeye.chat.messages import ChatMessage
from buckeye.chat.openai_api import IGNORED_FIELDS, PLAIN_TEXT_VALUES
from buckeye.workers.proxy.errors import WireError

_ACCEPTED_VALUES: Mapping[str, tuple[Any, ...]] = {
    **PLAIN_TEXT_VALUES,
    "background": (False,),
    "ignore_eos": (False,),
    "output_mode": ("tokens",),
    "text": ({"format": {"type": "text"}}, {}),
}
"""Fields that a policy does not support. The proxy accepts them only with these values or null."""

_INERT_FIELDS = IGNORED_FIELDS | {
    "betas",
    "cache_salt",
    "include",
    "request_id",
    "return_weight_versions",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncation",
}
"""Fields that never change the reply."""


FIELDS_WITHOUT_EFFECT = frozenset({"model", "ignore_eos", "request_id", "return_weight_versions"})
"""Fields of the inference server's requests that have no effect on a policy."""


def split_fields(fields: Any, known: frozenset[str], *, model: str = "") -> tuple[dict[str, Any], list[str]]:
    """Return the known fields of a request, and the names of the ignored settings.

    A `model` field that differs from the argument `model` counts as ignored. Raises `WireError` for a body
    that is not an object, and for a field that cannot be ignored.
    """
    if not isinstance(fields, dict):
        raise WireError(400, "The body must be a JSON object.")
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for name, value in fields.items():
        if name in known:
            kept[name] = value
        elif value is None or name in _INERT_FIELDS or (name == "model" and value == model):
            continue
        elif name in _ACCEPTED_VALUES:
            if value not in _ACCEPTED_VALUES[name]:
                raise WireError(400, f"`{name}` is not supported for a policy; leave it out.", code=name)
        else:
            dropped.append(name)
    return kept, dropped


def strip_messages(messages: Any, dropped: list[str]) -> Any:
    """Return messages without the fields that some clients add to those of OpenAI's API.

    Append the names of removed fields to `dropped`, except empty fields.
    """
    if not isinstance(messages, list):
        return messages
    known = frozenset(ChatMessage.__struct_fields__)
    stripped = []
    for message in messages:
        if not isinstance(message, dict) or message.keys() <= known:
            stripped.append(message)
            continue
        stripped.append({name: value for name, value in message.items() if name in known})
        dropped.extend(f"messages.{name}" for name, value in message.items() if name not in known and value)
    return stripped


def field_names(kind: type[msgspec.Struct], *, exclude: Sequence[str] = ()) -> frozenset[str]:
    """Return the field names of a class of requests, except those in `exclude`."""
    return frozenset(kind.__struct_fields__) - set(exclude)
