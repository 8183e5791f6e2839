"""Models that are only served by others: they can be evaluated, and not trained."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from buckeye.errors import UsageError


@dataclass(frozen=True, slots=True)
class _Service:
    """Who serves a family of models, and where an OpenAI client finds it."""

    name: str
    pattern: re.Pattern[str]
    base_url: str
    key: str


_SERVICES = (
    _Service(
        "OpenAI",
        re.compile(r"(openai/)?(chatgpt-|gpt-(?!oss|2|neo|j\b|sw3)|o[1-9](-|$))", re.I),
        "https://api.openai.com/v1",
        "OPENAI_API_KEY",
    ),
    _Service(
        "Anthropic",
        re.compile(r"(anthropic/)?claude", re.I),
        "https://api.anthropic.com/v1",
        "ANTHROPIC_API_KEY",
    ),
    _Service(
        "Google",
        re.compile(r"(google/)?gemini", re.I),
        "https://generativelanguage.googleapis.com/v1beta/openai",
        "GEMINI_API_KEY",
    ),
    _Service("xAI", re.compile(r"(xai/|x-ai/)?grok-", re.I), "https://api.x.ai/v1", "XAI_API_KEY"),
)


def refuse_hosted(model: str, *, dataset: str, config: str) -> None:
    """Raise UsageError if nobody has the weights of `model` but who serves it, with the command that
    evaluates it on these tasks."""
    service = next((one for one in _SERVICES if one.pattern.match(model)), None)
    if service is None:
        return
    words = ["buckeye", "eval", "buckeye-vf-gym", "--model", model.rpartition("/")[2]]
    words += ["--base-url", service.base_url]
    if service.key != "OPENAI_API_KEY":
        words += ["--api-key-var", service.key]
    words += ["--arg", f"taskset={dataset}", "--arg", f"config_path={config}"]
    raise UsageError(
        f"--model {model}: {service.name} serves it and gives nobody its weights, so it cannot be trained "
        f"here. Name a model whose weights can be had, as --model Qwen/Qwen3-0.6B.\n"
        f"To see how it does on these tasks (with {service.key} set):\n"
        f"  {shlex.join(words)}"
    )
