"""Parts of answers that every server of OpenAI's API has."""

from __future__ import annotations

from typing import Any

_LEAST_LOGPROB = -9999.0
_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable_error",
}


def least(logprob: float) -> float:
    """A log-prob as JSON can have it: OpenAI's stand-in for minus infinity is -9999."""
    return max(logprob, _LEAST_LOGPROB)


def error_content(message: str, status_code: int) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = _ERROR_TYPES.get(status_code, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status_code}}


def reasoning_fields(text: str) -> dict[str, str]:
    """Reasoning under the name that most clients read, and under vLLM's."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def usage_fields(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The `usage` of an answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
