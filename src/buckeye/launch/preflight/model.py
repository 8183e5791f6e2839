"""A model's files: where they are, its sizes, and if Buckeye can train it and sample from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.base.distribution import need
from buckeye.base.keys import key
from buckeye.base.storage import read_json
from buckeye.config.adapter import is_adapter, read_base_model
from buckeye.config.rl import RLConfig
from buckeye.config.trainer import LoRAConfig
from buckeye.errors import InferenceError, UsageError
from buckeye.inference.engine.architecture import check_sizes, read_spec
from buckeye.inference.render.template import PROBE_QUESTION, PROBE_SYSTEM
from buckeye.inference.render.template_files import TEMPLATE_FILE, read_template
from buckeye.launch.preflight.check import Check, failed, ok, skipped, warning
from buckeye.launch.preflight.disk import count_parameters
from buckeye.transport.checkpoint import check_shard_format

# The sizes of a model, from its `config.json` and the headers of its files. The memory plan uses them.


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a decoder. `tied` is True if embedding and output projection are one tensor."""

    vocabulary: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    max_positions: int
    parameters: int

    @property
    def embeddings(self) -> int:
        """Number of elements of the embedding and the output projection."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def layer(self) -> int:
        """Number of elements of one layer."""
        return (self.parameters - self.embeddings) // self.layers

    def adapter(self, lora: LoRAConfig) -> int:
        """Return the number of parameters of an adapter."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = {
            "q_proj": self.hidden + queries,
            "k_proj": self.hidden + keys,
            "v_proj": self.hidden + keys,
            "o_proj": queries + self.hidden,
            "gate_proj": self.hidden + self.mlp,
            "up_proj": self.hidden + self.mlp,
            "down_proj": self.mlp + self.hidden,
        }
        chosen = sum(sides.get(name.rpartition(".")[2], 0) for name in lora.target_modules)
        whole = [name for name in lora.modules_to_save if name in ("embed_tokens", "lm_head")]
        return self.layers * lora.rank * chosen + len(whole) * self.vocabulary * self.hidden


def read_shape(model_path: Path) -> ModelShape | None:
    """Return the sizes of a local model, or None if its `config.json` does not have them."""
    try:
        config = read_json(model_path / "config.json")
        return parse_shape(config, parameters=count_parameters(model_path))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def parse_shape(config: Mapping[str, Any], *, parameters: int | None = None) -> ModelShape:
    """Return the sizes in a `config.json`.

    `parameters` is the count from the model's files, if they are local; otherwise it is computed. Raises
    KeyError, TypeError or ValueError if a size is missing or invalid.
    """
    hidden, layers, heads = (
        int(config[name]) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    mlp, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    tied = bool(config.get("tie_word_embeddings", False))
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * mlp + 2 * hidden
    counted = layers * layer + vocabulary * hidden * (1 if tied else 2) + hidden
    return ModelShape(
        vocabulary=vocabulary,
        hidden=hidden,
        mlp=mlp,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied=tied,
        max_positions=int(config.get("max_position_embeddings", 2048)),
        parameters=parameters or counted,
    )


# Checks of the model, from its small files alone.

MODEL, TOKENIZER = "model", "tokenizer"
_SMALL_FILES = ("config.json", "tokenizer_config.json", "generation_config.json")
_INDEX = "model.safetensors.index.json"


def check_model(config: RLConfig, *, vllm: bool) -> Check:
    """Check that the model's files are complete, and that the engine supports the architecture."""
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
    """Return the weight files that a model directory lacks."""
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
    """Download a model's configuration from the Hugging Face hub, to check that the model is accessible."""
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(name, _SMALL_FILES[0], token=key("HF_TOKEN") or None)
    except Exception as error:  # network, authentication, unknown id: the hub's errors vary
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return failed(
            MODEL,
            f"{name} is not on this machine, and the Hugging Face hub does not give it: {reason}",
            "check model.name and the network; a model behind a licence needs HF_TOKEN",
        )
    return ok(MODEL, f"{name} is on the Hugging Face hub; a start fetches it")


def check_tokenizer(config: RLConfig) -> Check:
    """Check that the model has a tokenizer and a chat template."""
    path = find_model(config.trainer.model.name)
    if path is None:
        return skipped(TOKENIZER, "the model is not on this machine")
    if not any((path / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return failed(TOKENIZER, f"{path} has no tokenizer", "copy the tokenizer's files beside the weights")
    return check_template(path)


def check_template(path: Path) -> Check:
    """Check that the chat template in a model's folder renders prompts."""
    try:
        template = read_template(path)
    except InferenceError as error:
        return failed(TOKENIZER, str(error), "fetch or copy the model again")
    if template is None:
        return failed(
            TOKENIZER,
            f"{path} has no chat template, and environments speak in messages",
            f"use the instruction-tuned model of the family, or put a {TEMPLATE_FILE} beside its files",
        )
    refused, with_system = (
        template.find_problem([PROBE_QUESTION]),
        template.find_problem([PROBE_SYSTEM, PROBE_QUESTION]),
    )
    if refused is not None and with_system is not None:
        return failed(TOKENIZER, refused, f"correct {TEMPLATE_FILE}, or use another model of the family")
    messages = [PROBE_QUESTION] if refused is None else [PROBE_SYSTEM, PROBE_QUESTION]
    if PROBE_QUESTION["content"] not in template.text(messages, (), prompt=True):
        return failed(
            TOKENIZER, "the chat template does not write what the user says", f"correct {TEMPLATE_FILE}"
        )
    if template.missing_header:
        return warning(
            TOKENIZER,
            f"the chat template ignores add_generation_prompt; prompts get the header "
            f"{template.missing_header!r}, which it writes before replies",
            f"write it under `if add_generation_prompt` in {TEMPLATE_FILE}: other servers do not add it",
        )
    if with_system is not None:
        return ok(TOKENIZER, f"has a chat template that takes no system message: {with_system}")
    return ok(TOKENIZER, "has a chat template")


def find_model(name: str, revision: str | None = None) -> Path | None:
    """Return the local directory of a model without network access, or None if it must be downloaded."""
    if (Path(name) / "config.json").is_file():
        return Path(name).resolve()
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True)).resolve()
    except Exception:  # the hub's errors for "not cached" and "invalid id" differ between its versions
        return None


def cached_revision(model: Path) -> str | None:
    """Return the revision of a model in the hub's cache, or None for other directories."""
    return model.name if model.parent.name == "snapshots" else None


def fetch_base_model(adapter: Path) -> Path:
    """Return the local directory of an adapter's base model; download it if necessary.

    Raises UsageError if it is neither local nor on the hub, or if the adapter does not name it.
    """
    return fetch_model(*read_base_model(adapter))


def fetch_served_model(name: str) -> Path:
    """Return the directory to serve: of a model, or of an adapter whose base is downloaded if necessary."""
    if not is_adapter(name):
        return fetch_model(name)
    fetch_base_model(Path(name))
    return Path(name).resolve()


def fetch_model(name: str, revision: str | None = None) -> Path:
    """Return the local directory of a model; download it from the Hugging Face hub if necessary.

    Raises UsageError if it is neither local nor on the hub, or if torch is not installed.
    """
    need("torch", f"A model ({name})")
    found = find_model(name, revision)
    if found is not None:
        check_shard_format(found.parent)
        return found
    if is_adapter(name):
        raise UsageError(
            f"model.name: {name} is an adapter and no complete model; `buckeye export RUN --merge-lora` "
            "writes the model of a run that trained one."
        )
    if Path(name).exists() or name.startswith((".", "/", "~")):
        raise UsageError(f"model.name: {name} is not a model directory (it has no config.json).")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"],
                token=key("HF_TOKEN") or None,
            )
        ).resolve()
    except Exception as error:  # network, authentication, unknown id: the hub's errors vary
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"model.name: {name} is not a directory here, and fetching it from the Hugging Face hub "
            f"failed: {reason}"
        ) from None
