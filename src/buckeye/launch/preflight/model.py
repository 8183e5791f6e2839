"""Find the files of a model, read its sizes, and check that Buckeye can use the model."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from buckeye.base.distribution import need
from buckeye.base.keys import key
from buckeye.base.storage import read_json, step_directories
from buckeye.config.adapter import is_adapter, read_base_model
from buckeye.config.rl import RLConfig
from buckeye.config.trainer import LoRAConfig
from buckeye.errors import BuckeyeError, InferenceError, UsageError, first_line
from buckeye.inference.engine.architecture import is_untrained, read_model_config
from buckeye.inference.engine.general_spec import GeneralSpec, general_path_line
from buckeye.inference.render.template import PROBE_QUESTION, PROBE_SYSTEM
from buckeye.inference.render.template_files import TEMPLATE_FILE, read_template
from buckeye.launch.preflight.check import Check, failed, failed_with, ok, skipped, warning
from buckeye.launch.preflight.disk import count_parameters
from buckeye.launch.preflight.model_files import (
    check_model_files,
    check_readable,
    check_tokenizer_files,
    missing_error,
    missing_files,
)
from buckeye.monitor.learning_findings import PRETRAINED
from buckeye.run_files.directory import RUN_FILE
from buckeye.run_files.known_runs import find_run
from buckeye.run_files.record import ACTIVE_STATES, STATUS_FILE, read_record
from buckeye.trainer.model.trainable import unpacked_reasons, untrainable_reasons

MODEL, TOKENIZER = "model", "tokenizer"
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
"""Files of a model's repository that are downloaded. The cached copy of a model is complete with these."""
_LOOKUP_SECONDS = 10.0
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a model, for the forecast. `tied`: the embedding is also the output projection.

    In a mixture of experts, all layers except the first `dense_layers` have `experts` experts of `expert_mlp`
    units. A token passes through `active_experts` of them, and through `shared_experts` more.
    """

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
    experts: int = 0
    active_experts: int = 0
    shared_experts: int = 0
    expert_mlp: int = 0
    dense_layers: int = 0

    @property
    def embeddings(self) -> int:
        """Number of elements of the embedding and, if it is a separate tensor, the output projection."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def layer(self) -> int:
        """Number of elements of one layer."""
        return (self.parameters - self.embeddings) // self.layers

    @property
    def queries(self) -> int:
        """Number of columns of all queries of a layer."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Number of columns of all keys of a layer."""
        return self.kv_heads * self.head_dim

    @property
    def units(self) -> int:
        """Number of feed-forward units that a token passes in a layer."""
        return (self.active_experts + self.shared_experts) * self.expert_mlp if self.experts else self.mlp

    @property
    def active_expert_elements(self) -> int:
        """Number of elements of the experts, except shared ones, that a token is multiplied with."""
        return 3 * (self.layers - self.dense_layers) * self.active_experts * self.hidden * self.expert_mlp

    @property
    def matrix_elements(self) -> int:
        """Number of elements of all other matrices that a token is multiplied with."""
        idle = 3 * (self.layers - self.dense_layers) * self.experts * self.hidden * self.expert_mlp
        return self.parameters - idle - self.embeddings + self.vocabulary * self.hidden

    def adapter(self, lora: LoRAConfig) -> int:
        """Return the number of parameters of a LoRA adapter for the model."""
        routed = (self.experts + self.shared_experts) * (self.hidden + self.expert_mlp)
        sparse = self.layers - self.dense_layers if self.experts else 0
        feed_forward = (self.layers - sparse) * (self.hidden + self.mlp) + sparse * routed
        dimensions = {
            "q_proj": self.layers * (self.hidden + self.queries),
            "k_proj": self.layers * (self.hidden + self.keys),
            "v_proj": self.layers * (self.hidden + self.keys),
            "qkv_proj": self.layers * (self.hidden + self.queries + 2 * self.keys),
            "o_proj": self.layers * (self.queries + self.hidden),
            "gate_proj": feed_forward,
            "up_proj": feed_forward,
            "gate_up_proj": self.layers * (self.hidden + 2 * self.mlp),
            "down_proj": feed_forward,
        }
        adapted = sum(dimensions.get(name.rpartition(".")[2], 0) for name in lora.target_modules)
        whole = [name for name in lora.modules_to_save if name in ("embed_tokens", "lm_head")]
        return lora.rank * adapted + len(whole) * self.vocabulary * self.hidden


def read_shape(model_path: Path) -> ModelShape | None:
    """Return the sizes of a local model, or None if its `config.json` does not have them."""
    try:
        config = read_json(model_path / "config.json")
        return parse_shape(config, parameters=count_parameters(model_path))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def parse_shape(config: Mapping[str, Any], *, parameters: int | None = None) -> ModelShape:
    """Return the sizes in a `config.json`.

    `parameters` is the number of parameters in the weight files. Without local files, pass None: the number
    is computed. Raises KeyError, TypeError or ValueError if a size is missing or invalid.
    """
    hidden, layers, heads = (
        int(config[name]) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    mlp, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    tied = bool(config.get("tie_word_embeddings", False))
    experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
    shared, dense = int(config.get("n_shared_experts") or 0), int(config.get("first_k_dense_replace") or 0)
    expert_mlp = int(config.get("moe_intermediate_size") or mlp)
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * mlp + 2 * hidden
    moe = hidden * (3 * (experts + shared) * expert_mlp + experts - 3 * mlp) if experts else 0
    computed = layers * layer + (layers - dense) * moe + vocabulary * hidden * (1 if tied else 2) + hidden
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
        parameters=parameters or computed,
        experts=experts,
        active_experts=int(config.get("num_experts_per_tok") or 0) if experts else 0,
        shared_experts=shared,
        expert_mlp=expert_mlp if experts else 0,
        dense_layers=dense,
    )


def check_model(config: RLConfig, *, vllm: bool) -> Check:
    """Check that the files of the model are complete, and that the engine supports its architecture."""
    name, path = config.trainer.model.name, find_model(config.trainer.model.name)
    if path is None:
        try:
            refuse_path(name, at=None)
        except UsageError as error:
            return failed_with(MODEL, error)
        near = nearest_model(name)
        hint = f"; did you mean {near}?" if near else ""
        return skipped(MODEL, f"{name} is downloaded from the Hugging Face hub when the run starts{hint}")
    check = _check_architecture(config, path, vllm=vllm)
    ckpt = config.trainer.ckpt
    is_new = ckpt is None or ckpt.resume_step is None
    if check.state != "failed" and not check.do and is_new and is_untrained(path):
        return warning(MODEL, f"{check.seen}: these weights are untrained", PRETRAINED)
    return check


def _check_architecture(config: RLConfig, path: Path, *, vllm: bool) -> Check:
    embedded = config.inference is not None and not vllm
    try:
        check_readable(path)
        model_config = read_model_config(path / "config.json")
        named = isinstance(model_config.get("model_type"), str)
        reasons = untrainable_reasons(model_config) if named and embedded else []
        if reasons:  # with another server, this is a problem of settings
            at = f"{path}/config.json"
            return failed(
                MODEL, f"{at}: {'; '.join(reasons)}", "use another model", code="BK-MODEL-UNSUPPORTED"
            )
        spec = check_model_files(path, "engine" if embedded else "trainer")
    except (InferenceError, UsageError) as error:
        return failed_with(MODEL, error, "use another model")
    seen = f"{(model_config.get('architectures') or [model_config['model_type']])[0]}, {path}"
    is_general = bool(unpacked_reasons(model_config)) or (embedded and isinstance(spec, GeneralSpec))
    general = warning(MODEL, f"{seen}; {general_path_line(str(model_config['model_type']))}", "")
    if not embedded or spec is None:
        return general if is_general else ok(MODEL, seen)
    seq_len = config.orchestrator.seq_len
    if seq_len > spec.max_positions:
        return warning(
            MODEL,
            f"{seen}: the model has {spec.max_positions} positions, but seq_len is {seq_len}",
            f"add `--seq-len {spec.max_positions}`",
        )
    return general if is_general else ok(MODEL, seen)


def fetch_small_files(name: str) -> Check:
    """Check that a model is on the Hugging Face hub: download its `config.json`."""
    from huggingface_hub import hf_hub_download

    try:
        _look_up_on_hub(name)
        hf_hub_download(name, "config.json", token=key("HF_TOKEN") or None)
    except Exception as error:  # network, authentication, unknown id: the hub's errors vary
        return failed(
            MODEL,
            f"cannot download {name}: {first_line(error)}",
            _download_hint(name),
            code="BK-MODEL-NOT-FOUND",
        )
    return ok(MODEL, f"{name} is on the Hugging Face hub; it is downloaded when the run starts")


def _download_hint(name: str) -> str:
    near = nearest_model(name)
    similar = f"did you mean {near}? Else " if near else ""
    return f"{similar}check the name and the network; a gated model needs HF_TOKEN"


def nearest_model(name: str) -> str | None:
    """Return the local model directory whose path is most similar to `name`, or None.

    Each missing folder of the path is replaced by the most similar one. If a folder has no similar ones, the
    newest weights of a run that contain or precede it are returned.
    """
    folder = Path(name).expanduser()
    found = Path(folder.anchor)
    for part in folder.parts[1:] if folder.is_absolute() else folder.parts:
        if (found / part).is_dir():
            found /= part
            continue
        similar = get_close_matches(part, _folders_in(found), 1, cutoff=0.75)
        if not similar:
            break
        found /= similar[0]
    else:
        if (found / "config.json").is_file():
            return str(found)
    versions = step_directories(found) or step_directories(found / "weights")
    newest = versions[max(versions)] if versions and found.parts else None
    return str(newest) if newest is not None and (newest / "config.json").is_file() else None


def _folders_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.is_dir()]
    except OSError:  # missing, or not readable
        return []


def check_tokenizer(config: RLConfig) -> Check:
    """Check that the model has a tokenizer and a chat template."""
    path = find_model(config.trainer.model.name)
    if path is None:
        return skipped(TOKENIZER, "the model is not on this machine")
    try:
        problem = check_tokenizer_files(path)
        check = check_template(path)
    except ModuleNotFoundError as error:  # the base install, which reports the missing extra elsewhere
        return skipped(TOKENIZER, f"{error.name} is not installed")
    except BuckeyeError as error:
        return failed_with(TOKENIZER, error)
    if check.state != "ok" or problem is None:
        return check
    return warning(TOKENIZER, problem, "copy the tokenizer that belongs to the model")


def check_model_and_tokenizer(path: Path) -> None:
    """Raise `BuckeyeError` if a model, its tokenizer or its chat template cannot be used for training."""
    check_model_files(path, "trainer")
    check_tokenizer_files(path)
    check = check_template(path)
    if check.state == "failed":
        raise UsageError(check.seen, code=check.code, at=str(path), hint=check.do)


def has_tokenizer(model: Path) -> bool:
    """Return True if a model's folder has a tokenizer."""
    return any((model / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def check_template(path: Path) -> Check:
    """Check that the chat template in a model's folder renders prompts."""
    try:
        template = read_template(path)
    except InferenceError as error:
        return failed_with(TOKENIZER, error, "download or copy the model again")
    if template is None:
        return failed(
            TOKENIZER,
            f"{path} has no chat template, which the prompts of environments need",
            f"use an instruction-tuned model, or add a {TEMPLATE_FILE} to its directory",
            code="BK-TEMPLATE",
        )
    problem = template.find_problem([PROBE_QUESTION])
    system_problem = template.find_problem([PROBE_SYSTEM, PROBE_QUESTION])
    if problem is not None and system_problem is not None:
        do = f"correct {TEMPLATE_FILE}, or use another model"
        return failed(TOKENIZER, problem, do, code="BK-TEMPLATE")
    messages = [PROBE_QUESTION] if problem is None else [PROBE_SYSTEM, PROBE_QUESTION]
    if PROBE_QUESTION["content"] not in template.text(messages, (), prompt=True):
        seen = f"the chat template of {path} omits user messages"
        return failed(TOKENIZER, seen, f"correct {TEMPLATE_FILE}", code="BK-TEMPLATE")
    if template.missing_header:
        return warning(
            TOKENIZER,
            f"the chat template ignores add_generation_prompt; Buckeye adds the header "
            f"{template.missing_header!r} to prompts",
            f"other servers do not add it: write it in {TEMPLATE_FILE}, under `if add_generation_prompt`",
        )
    if system_problem is not None:
        return ok(TOKENIZER, f"found a chat template, which cannot render system messages: {system_problem}")
    return ok(TOKENIZER, "found a chat template")


def find_model(name: str, revision: str | None = None) -> Path | None:
    """Return the local directory of a model without network access, or None if it must be downloaded."""
    if os.path.isfile(Path(name) / "config.json"):  # Path.is_file raises PermissionError
        return Path(name).resolve()
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=MODEL_FILES, local_files_only=True)
        ).resolve()
    except Exception:  # the hub's errors for "not cached" and "invalid id" differ between its versions
        return None


def cached_revision(model: Path) -> str | None:
    """Return the revision of a model in the cache of the Hugging Face hub, or None for other directories."""
    return model.name if model.parent.name == "snapshots" else None


def refuse_path(name: str, *, at: str | None = "model.name") -> None:
    """Raise UsageError if `name` is a path. The caller has found no model at this path.

    A name with more than one slash, or whose first folder exists, is not a name on the hub. The error names
    the setting or flag `at`, and the most similar model directory.
    """
    path, first = Path(name).expanduser(), name.partition("/")[0]
    if name.endswith(".gguf") and path.is_file():
        folder = path.stem.lower()
        raise UsageError(
            f"{name}: a GGUF file must be imported first",
            code="BK-MODEL-NOT-FOUND",
            at=at,
            hint=f"import it with `buckeye model import {name} {folder}`, then use the model {folder}",
        )
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists()
    if not is_path and not Path(first).is_dir():
        return
    near = nearest_model(name)
    hint = f"did you mean {near}?" if near else "pass the directory of a model, or its name on the hub"
    if not is_path:
        hint += f"{'' if near else '.'} For the model {name} of the hub, work in a folder without {first}/"
    if path.is_dir():
        check_readable(path, at=at)
    problem = "is not a model directory: it has no config.json" if path.exists() else "does not exist"
    raise UsageError(f"{name} {problem}", code="BK-MODEL-NOT-FOUND", at=at, hint=hint)


def check_model_name(name: str, *, at: str) -> None:
    """Raise UsageError for a model that is neither complete on this machine nor on the hub.

    Unlike `fetch_served_model`, this downloads no weights. Errors name the setting or flag `at`.
    """
    path = find_model(name)
    if is_adapter(name):
        fetch_served_model(name, at=at)
    elif path is None:
        refuse_path(name, at=at)
        try:
            _look_up_on_hub(name)
        except Exception as error:  # network, authentication, unknown id: the hub's errors vary
            raise _hub_error(name, at, error) from None
    elif missing := missing_files(path):
        raise missing_error(path, missing)


def _look_up_on_hub(name: str) -> None:
    """Raise an error of the hub's library if a model is not on the hub. Unlike a download, never retry."""
    from huggingface_hub import HfApi

    HfApi(token=key("HF_TOKEN") or None).model_info(name, timeout=_LOOKUP_SECONDS)


def run_directory(name: str) -> Path | None:
    """Return the directory of the run `name`, which is its directory, name or id; None if it is not a run.

    An existing path that is not a run is not searched among the names of runs. Raises UsageError if several
    runs have the name.
    """
    if Path(name).exists() or "/" in name:
        return Path(name) if (Path(name) / RUN_FILE).exists() else None
    try:
        return find_run(name)
    except UsageError as error:
        if error.code == "BK-RUN-NOT-FOUND":
            return None
        raise


def resolve_run(name: str, *, at: str = "--model") -> str:
    """Return the newest weights of the run `name`, which is its directory, name or id; other names unchanged.

    A path that exists, else the name or id of a run, else a name on the hub. Raises UsageError for a run
    without weights, and for an active run, which deletes weights.
    """
    run = Path(name) if (Path(name) / "weights").is_dir() else run_directory(name)
    if run is None or (run / "config.json").exists():
        return name
    weights = step_directories(run / "weights")
    if not weights:
        raise UsageError(
            f"run {run} has no weights",
            code="BK-MODEL-NOT-FOUND",
            at=at,
            hint=f"train it, or if it has a checkpoint, export that: buckeye export {shlex.quote(str(run))}",
        )
    newest = str(weights[max(weights)])
    if (run / STATUS_FILE).exists() and read_record(run).actual_state() in ACTIVE_STATES:
        raise UsageError(
            f"{name} is an active run, which deletes its weights, such as {newest}",
            code="BK-MODEL-NOT-FOUND",
            at=at,
            hint=f"wait for its end, or export a checkpoint: buckeye export {shlex.quote(name)}",
        )
    return newest


def fetch_base_model(adapter: Path) -> Path:
    """Return the local directory of the base model of an adapter; download the model if necessary.

    Raises UsageError if the base model is neither local nor on the hub, or if the adapter does not name it.
    """
    return fetch_model(*read_base_model(adapter))


def fetch_served_model(name: str, *, at: str = "model.name") -> Path:
    """Return the directory of a model or adapter to serve; download the model or base model if necessary.

    Errors name the setting or flag `at` as the source of the name.
    """
    if not is_adapter(name):
        return fetch_model(name, at=at)
    fetch_base_model(Path(name))
    return Path(name).resolve()


def fetch_model(name: str, revision: str | None = None, *, at: str = "model.name") -> Path:
    """Return the local directory of a model; download it from the Hugging Face hub if necessary.

    Errors name the setting or flag `at` as the source of the name. Raises UsageError if the model is neither
    local nor on the hub, or if torch is not installed.
    """
    need("torch", f"A model ({name})")
    path = find_model(name, revision)
    if path is not None:
        return path
    if is_adapter(name):
        raise UsageError(
            f"{name} is an adapter, not a complete model",
            code="BK-MODEL-NOT-FOUND",
            at=at,
            hint="merge the adapter of a run into its model: buckeye export RUN --merge-lora",
        )
    refuse_path(name, at=at)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=MODEL_FILES,
                token=key("HF_TOKEN") or None,
            )
        ).resolve()
    except Exception as error:  # network, authentication, unknown id: the hub's errors vary
        raise _hub_error(name, at, error) from None


def _hub_error(name: str, at: str, error: Exception) -> UsageError:
    return UsageError(
        f"{name} is not a local directory, and cannot be downloaded from the Hugging Face hub: "
        f"{first_line(error)}",
        code="BK-MODEL-NOT-FOUND",
        at=at,
        hint=_download_hint(name),
    )
