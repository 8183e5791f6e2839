"""Whether the model is one that can be trained and sampled from, as far as its small files tell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from buckeye.config.rl import RLConfig
from buckeye.errors import InferenceError, UsageError
from buckeye.inference.architecture import check_sizes, read_spec
from buckeye.run.model_files import find_model
from buckeye.run.preflight.check import Check, failed, ok, skipped, warning
from buckeye.storage import read_json
from buckeye.tasks.keys import key

MODEL, TOKENIZER = "model", "tokenizer"
_SMALL_FILES = ("config.json", "tokenizer_config.json", "generation_config.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_INDEX = "model.safetensors.index.json"


def check_model(config: RLConfig, *, vllm: bool) -> Check:
    """The files that are here, and whether the engine knows the architecture."""
    name, path = config.trainer.model.name, find_model(config.trainer.model.name)
    if path is None:
        if Path(name).exists() or name.startswith((".", "/", "~")):
            return failed(
                MODEL, f"{name} is not a model directory (it has no config.json)", "check model.name"
            )
        return skipped(MODEL, f"{name} is not on this machine; a start fetches it from the Hugging Face hub")
    missing = missing_files(path)
    if missing:
        return failed(MODEL, f"{path} lacks {', '.join(missing)}", "fetch or copy the model again")
    return _known(config, path, vllm=vllm)


def missing_files(path: Path) -> list[str]:
    """The weight files that a model directory should have and lacks."""
    if (path / _INDEX).is_file():
        try:
            files = sorted(set(map(os.fspath, read_json(path / _INDEX)["weight_map"].values())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return [f"a readable {_INDEX}"]
        return [file for file in files if not os.path.isfile(path / file)]
    return [] if (path / "model.safetensors").is_file() else ["model.safetensors"]


def _known(config: RLConfig, path: Path, *, vllm: bool) -> Check:
    try:
        described: dict[str, Any] = read_json(path / "config.json")
        architecture = (described.get("architectures") or ["no architecture named"])[0]
        check_sizes(path)
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
        return failed(MODEL, f"{path / 'config.json'} cannot be read: {error}", "fetch the model again")
    except (InferenceError, UsageError) as error:
        return failed(MODEL, str(error), "fetch the model again")
    seen = f"{architecture}, {path}"
    if config.inference is None or vllm:
        return ok(MODEL, seen)
    try:
        spec = read_spec(path)
    except InferenceError as error:
        return failed(MODEL, str(error), "use vLLM on a GPU (`buckeye vllm install`), or another model")
    longest = config.orchestrator.seq_len
    if longest > spec.max_positions:
        return warning(
            MODEL,
            f"{seen}: it has {spec.max_positions} positions, and rollouts may have {longest} tokens",
            f"--seq-len {spec.max_positions}",
        )
    return ok(MODEL, seen)


def fetch_small_files(name: str) -> Check:
    """Ask the Hugging Face hub for a model's configuration, to see that it can be had. Needs the network."""
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(name, _SMALL_FILES[0], token=key("HF_TOKEN") or None)
    except Exception as error:  # network, authentication, unknown id: one message whatever the library raises
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return failed(
            MODEL,
            f"{name} is not on this machine, and the Hugging Face hub does not give it: {reason}",
            "check model.name and the network; a model behind a licence needs HF_TOKEN",
        )
    return ok(MODEL, f"{name} is on the Hugging Face hub; a start fetches it")


def check_tokenizer(config: RLConfig) -> Check:
    """Conversations need a chat template."""
    path = find_model(config.trainer.model.name)
    if path is None:
        return skipped(TOKENIZER, "the model is not on this machine")
    if not any((path / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return failed(TOKENIZER, f"{path} has no tokenizer", "copy the tokenizer's files beside the weights")
    if not has_template(path):
        return failed(
            TOKENIZER,
            f"{path} has no chat template, and environments speak in messages",
            "use the instruction-tuned model of the family, or put a chat_template.jinja beside its files",
        )
    return ok(TOKENIZER, "has a chat template")


def has_template(path: Path) -> bool:
    """Whether a tokenizer comes with a chat template."""
    if any((path / file).is_file() for file in _TEMPLATES):
        return True
    try:
        return bool(read_json(path / "tokenizer_config.json").get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False
