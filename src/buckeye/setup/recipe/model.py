"""Facts about a model before it is trained: its location, size and maximum length."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.storage import read_json
from buckeye.config.adapter import is_adapter, read_base_model
from buckeye.errors import UsageError
from buckeye.launch.preflight.model import find_model, refuse_path
from buckeye.launch.preflight.model_shape import read_shape

_OPENAI_MODELS = r"(openai/)?(chatgpt-|gpt-(?!oss|2|neo|j\b|sw3)|o[1-9](-|$))"
_GOOGLE = "https://generativelanguage.googleapis.com/v1beta/openai"
_SERVICES = (
    ("OpenAI", _OPENAI_MODELS, "https://api.openai.com/v1", "OPENAI_API_KEY"),
    ("Anthropic", r"(anthropic/)?claude", "https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
    ("Google", r"(google/)?gemini", _GOOGLE, "GEMINI_API_KEY"),
    ("xAI", r"(xai/|x-ai/)?grok-", "https://api.x.ai/v1", "XAI_API_KEY"),
)
"""Services with models whose weights are not public: name, pattern of the models, URL, and key."""
_SIZE_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z0-9])", re.I)
_UNIT = {"b": 1_000_000_000, "m": 1_000_000}
_UNKNOWN_PARAMETERS = 1_000_000_000
_DEFAULT_POSITIONS = 4096
SUGGESTED = (
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "smallest; the only one that fits a CPU"),
    ("Qwen/Qwen3-0.6B", "small reasoning model; any GPU"),
    ("Qwen/Qwen3-1.7B", "a GPU with 24 GB, or two GPUs"),
    ("Qwen/Qwen3-4B", "a GPU with 80 GB, or two with 48 GB"),
)
"""Public models that the embedded engine supports, with the hardware they suit."""


def refuse_hosted(model: str) -> None:
    """Raise UsageError if the weights of `model` are not public. The hint has a command to evaluate it."""
    service = next((service for service in _SERVICES if re.match(service[1], model, re.I)), None)
    if service is None:
        return
    name, _, base_url, key = service
    key_flag = "" if name == "OpenAI" else f" --api-key-var {key}"
    raise UsageError(
        f"--model {model}: cannot be trained, because {name} does not publish its weights",
        code="BK-MODEL-UNSUPPORTED",
        hint="Use a model with public weights, such as --model Qwen/Qwen3-0.6B.\n"
        f"To evaluate this model (with {key} set):\n"
        f"  buckeye eval ENV --model {shlex.quote(model.rpartition('/')[2])} --base-url {base_url}{key_flag}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts about a model.

    `path` is None if the model must be downloaded. `parameters` is then read from the name of the model, or
    is a guess (`is_estimated`). `positions` is the maximum length in tokens.
    """

    name: str
    path: Path | None
    parameters: int
    is_estimated: bool = False
    positions: int = _DEFAULT_POSITIONS


def default_model(*, on_gpu: bool) -> str:
    """Return the default model: one that trains on this kind of machine."""
    return SUGGESTED[1][0] if on_gpu else SUGGESTED[0][0]


def model_facts(name: str) -> ModelFacts:
    """Return the facts about a model, or about the base of an adapter.

    If the files of the model are not on this machine, its size comes from its name.

    Raises UsageError for a path that does not exist, and for an incomplete model.
    """
    stored = read_base_model(Path(name))[0] if is_adapter(name) else name
    path = find_model(stored)
    shape = read_shape(path) if path is not None else None
    if shape is not None:
        return ModelFacts(name=name, path=path, parameters=shape.parameters, positions=shape.max_positions)
    if path is None:
        refuse_path(stored, at="--model")
    else:
        _check_config(stored, path / "config.json")
    size = _SIZE_IN_NAME.search(stored.rpartition("/")[2])
    parameters = int(float(size[1]) * _UNIT[size[2].lower()]) if size else _UNKNOWN_PARAMETERS
    return ModelFacts(name=name, path=path, parameters=parameters, is_estimated=size is None)


def _check_config(name: str, file: Path) -> None:
    """Raise UsageError unless the file is a JSON object."""
    hint = "Download or copy the model again"
    try:
        is_object = isinstance(read_json(file), dict)
    except (OSError, ValueError) as error:
        message = f"--model {name}: {file} cannot be read: {error}"
        raise UsageError(message, code="BK-MODEL-DAMAGED", hint=hint) from None
    if not is_object:
        raise UsageError(f"--model {name}: {file} is not a JSON object", code="BK-MODEL-DAMAGED", hint=hint)
