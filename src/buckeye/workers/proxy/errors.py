"""Errors of the proxy, in the format of each API."""

from __future__ import annotations

from typing import Any, Literal

from buckeye.chat.openai_api import error_body

Dialect = Literal["openai", "anthropic"]

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


class WireError(Exception):
    """Refused or failed request. It has an HTTP status, a message, and optionally OpenAI's error code."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def content(self, dialect: Dialect) -> dict[str, Any]:
        """Return the body of the error response."""
        if dialect == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": str(self)}}
        content = error_body(str(self), self.status)
        if self.code is not None:
            content["error"]["code"] = self.code
        return content
