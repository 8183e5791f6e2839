"""Redaction of secrets in settings, before they leave this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from buckeye.base.keys import variables
from buckeye.errors import UsageError

REDACTED = "(redacted)"

_SECRET_NAME = re.compile(
    r"(^|[_\-.])(key|api_?keys?|token|(access|api|auth|refresh)_?tokens|secrets?|passwords?|passwd|pwd|"
    r"credentials?|headers?|auth|authorization|bearer|cookies?)$",
    re.I,
)
_WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # in openaiApiKey, APIKey
_QUERY = re.compile(r"(?<=[?&;])([\w.\-]+)=([^&;#\s]+)")
_SECRET_OF_A_QUERY = re.compile(r"(^|[_\-.])sig(nature)?$", re.I)
_BEARER = re.compile(r"\b(Bearer\s+)[\w.~+/=\-]{8,}", re.I)
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$")
_SECRET_VALUE = re.compile(r"\b(sk|hf|pit|ghp|gho|github_pat|xox[a-z]|AKIA)[-_]?[A-Za-z0-9_\-]{16,}")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_SHORTEST_SECRET = 8


def redact(settings: Any, *, by_name: bool = True) -> Any:
    """Return a copy of JSON-like settings with secrets replaced by `(redacted)`.

    These texts are secrets:

    - a text with a secret name: `api_key`, `openaiApiKey`, `token`, `headers`, ... (not with `by_name=False`,
      for data that may have a column `tokens`)
    - the value of an environment variable or key that has a secret name
    - a text that has the format of a known kind of key, or that follows `Bearer`
    - in a URL, the login, and the values of query parameters that have secret names
    """
    return _redacted(settings, _values_of_secret_variables(), by_name)


def _redacted(value: Any, known: Sequence[str], by_name: bool) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _hidden(item) if by_name and _is_secret(str(name)) else _redacted(item, known, by_name)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redacted(item, known, by_name) for item in value]
    if isinstance(value, str):
        return _without_secrets(value, known)
    return value


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(_WORD_BOUNDARY.sub("_", name)) is not None


def _hidden(value: Any) -> Any:
    """Replace all texts of a value, also inside mappings and lists. Other values are not secrets."""
    if isinstance(value, Mapping):
        return {name: _hidden(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item) for item in value]
    return REDACTED if isinstance(value, str) and value else value


def _without_secrets(text: str, known: Sequence[str]) -> str:
    for secret in known:
        text = text.replace(secret, REDACTED)
    text = _BEARER.sub(rf"\g<1>{REDACTED}", _SECRET_VALUE.sub(REDACTED, text))
    return _LOGIN.sub(f"{REDACTED}@", _QUERY.sub(_query_without_secret, text))


def _query_without_secret(pair: re.Match[str]) -> str:
    name = pair[1]
    return f"{name}={REDACTED}" if _is_secret(name) or _SECRET_OF_A_QUERY.search(name) else pair[0]


def _values_of_secret_variables() -> list[str]:
    """Return the values of all environment variables and keys that have a secret name, the longest first."""
    try:
        known: Mapping[str, str] = variables()
    except UsageError:  # a damaged file contains no usable key
        known = os.environ
    secrets = {value for name, value in known.items() if _SECRET_VARIABLE.search(name)}
    return sorted((value for value in secrets if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)
