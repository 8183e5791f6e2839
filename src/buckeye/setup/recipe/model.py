"""Facts about a model before it is trained: its location, size and maximum length."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.storage import read_json
from buckeye.errors import UsageError
from buckeye.launch.preflight.model import find_model, read_shape
from buckeye.mcp.environment import NAME

_OF_OPENAI = r"(openai/)?(chatgpt-|gpt-(?!oss|2|neo|j\b|sw3)|o[1-9](-|$))"
_GOOGLE = "https://generativelanguage.googleapis.com/v1beta/openai"
_SERVICES = (
    ("OpenAI", _OF_OPENAI, "https://api.openai.com/v1", "OPENAI_API_KEY"),
    ("Anthropic", r"(anthropic/)?claude", "https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
    ("Google", r"(google/)?gemini", _GOOGLE, "GEMINI_API_KEY"),
    ("xAI", r"(xai/|x-ai/)?grok-", "https://api.x.ai/v1", "XAI_API_KEY"),
)
"""Services with models whose weights are not public: name, pattern of the models, address, and key."""


def refuse_hosted(model: str, *, dataset: str, config: str) -> None:
    """Raise UsageError if only a service has the weights of `model`.

    The message has the command that evaluates it on these tasks.
    """
    service = next((one for one in _SERVICES if re.match(one[1], model, re.I)), None)
    if service is None:
        return
    name, _, base_url, key = service
    words = ["buckeye", "eval", NAME, "--model", model.rpartition("/")[2]]
    words += ["--base-url", base_url, *([] if name == "OpenAI" else ["--api-key-var", key])]
    words += ["--arg", f"dataset={dataset}", "--arg", f"config_path={config}"]
    raise UsageError(
        f"--model {model}: {name} serves it and gives nobody its weights, so it cannot be trained "
        f"here. Name a model whose weights can be had, as --model Qwen/Qwen3-0.6B.\n"
        f"To see how it does on these tasks (with {key} set):\n"
        f"  {shlex.join(words)}"
    )


_IN_A_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z0-9])", re.I)
_UNIT = {"b": 1_000_000_000, "m": 1_000_000}
_UNKNOWN_PARAMETERS = 1_000_000_000
_USUAL_POSITIONS = 4096

SUGGESTED = (
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "the smallest; the only one of these for a CPU"),
    ("Qwen/Qwen3-0.6B", "small, thinks, any GPU"),
    ("Qwen/Qwen3-1.7B", "a GPU with 24 GB, or two"),
    ("Qwen/Qwen3-4B", "a GPU with 80 GB, or two with 48"),
)
"""Public models that the embedded engine supports, with the hardware they suit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts about a model.

    A model that must be downloaded has a `path` of None. Its `parameters` are then read from its name, or
    `is_estimated`. `positions` is the maximum length in tokens.
    """

    name: str
    path: Path | None
    parameters: int
    is_estimated: bool = False
    positions: int = _USUAL_POSITIONS


def default_model(*, on_gpu: bool) -> str:
    """Return the default model: one that trains on this kind of machine."""
    return SUGGESTED[1][0] if on_gpu else SUGGESTED[0][0]


def model_facts(name: str) -> ModelFacts:
    """Return the facts about a local model, or as far as possible about a model by name.

    Raises UsageError for a path that does not exist, and for an incomplete model.
    """
    path = find_model(name)
    shape = read_shape(path) if path is not None else None
    if shape is not None:
        return ModelFacts(name=name, path=path, parameters=shape.parameters, positions=shape.max_positions)
    if path is None and (name.startswith((".", "/", "~")) or Path(name).exists()):
        raise UsageError(
            f"--model {name}: this is no folder with a model (it has no config.json). Name one that is, or a "
            "model of the Hugging Face hub, as --model Qwen/Qwen3-0.6B"
        )
    if path is not None and not isinstance(_described(name, path), dict):
        raise UsageError(f"--model {name}: {path}/config.json does not describe a model. Copy it again")
    named = _IN_A_NAME.search(name.rpartition("/")[2])
    parameters = int(float(named[1]) * _UNIT[named[2].lower()]) if named else _UNKNOWN_PARAMETERS
    return ModelFacts(name=name, path=path, parameters=parameters, is_estimated=named is None)


def _described(name: str, path: Path) -> object:
    try:
        return read_json(path / "config.json")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--model {name}: {path}/config.json cannot be read: {error}. Copy it again"
        ) from None
