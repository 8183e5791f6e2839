"""Find the directory of a model: on this machine, in a run, or on the Hugging Face hub."""

from __future__ import annotations

import os
import re
import shlex
from difflib import get_close_matches
from pathlib import Path

from buckeye.base.columns import quoted
from buckeye.base.distribution import need
from buckeye.base.keys import key
from buckeye.base.storage import step_directories
from buckeye.config.adapter import is_adapter, read_base_model
from buckeye.errors import UsageError, first_line
from buckeye.launch.preflight.model_files import check_readable, missing_error, missing_files
from buckeye.run_files.directory import RUN_FILE
from buckeye.run_files.known_runs import find_run
from buckeye.run_files.record import ACTIVE_STATES, STATUS_FILE, read_record

MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
"""Files of a model's repository that are downloaded. The cached copy of a model is complete with these."""
_LOOKUP_SECONDS = 10.0
_HUB_NAME = re.compile(r"([\w.-]+/)?[\w.-]+", re.ASCII)


def download_hint(name: str) -> str:
    """Return the hint of the error that a model cannot be downloaded."""
    near = nearest_model(name)
    similar = f"did you mean {near}? Else " if near else ""
    return f"{similar}check the name and the network; a gated model needs HF_TOKEN"


def nearest_model(name: str) -> str | None:
    """Return the local model directory whose path is most similar to `name`, or None.

    Each missing folder of the path is replaced by the most similar one. If a folder has no similar ones, the
    newest weights of a run that contain or precede it are returned.
    """
    folder = Path(os.path.expanduser(name))
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


def has_tokenizer(model: Path) -> bool:
    """Return True if a model's folder has a tokenizer."""
    return any((model / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def cached_revision(model: Path) -> str | None:
    """Return the revision of a model in the cache of the Hugging Face hub, or None for other directories."""
    return model.name if model.parent.name == "snapshots" else None


def refuse_path(name: str, *, at: str | None = "model.name") -> None:
    """Raise UsageError if `name` is a path. The caller has found no model at this path.

    A name that the hub cannot have, or whose first folder exists, is not a name on the hub. The error names
    the setting or flag `at`, and the most similar model directory.
    """
    path, first = Path(os.path.expanduser(name)), name.partition("/")[0]
    if name.endswith(".gguf") and path.is_file():
        folder = path.stem.lower()
        command = f"buckeye model import {quoted(name)} {quoted(folder)}"
        hint = f"import it with `{command}`, then use the model {folder}"
        raise _error(f"{name}: a GGUF file must be imported first", hint, at)
    is_path = name.startswith((".", "/", "~")) or path.exists() or _HUB_NAME.fullmatch(name) is None
    if not is_path and not Path(first).is_dir():
        return
    near = nearest_model(name)
    hint = f"did you mean {near}?" if near else "pass the directory of a model, or its name on the hub"
    if not is_path:
        hint += f"{'' if near else '.'} For the model {name} of the hub, work in a folder without {first}/"
    if path.is_dir():
        check_readable(path, at=at)
    problem = "is not a model directory: it has no config.json" if path.exists() else "does not exist"
    raise _error(f"{name} {problem}", hint, at)


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
            look_up_on_hub(name)
        except Exception as error:  # network, authentication, unknown id: the hub's errors vary
            raise _hub_error(name, at, error) from None
    elif missing := missing_files(path):
        raise missing_error(path, missing)


def look_up_on_hub(name: str) -> None:
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

    A path that exists, else the name or id of a run, else a name on the hub. `~` is the home directory.
    Raises UsageError for a run without weights, and for an active run, which deletes weights.
    """
    name = os.path.expanduser(name)
    run = Path(name) if (Path(name) / "weights").is_dir() else run_directory(name)
    if run is None or (run / "config.json").exists():
        return name
    weights = step_directories(run / "weights")
    if not weights:
        hint = f"train it, or if it has a checkpoint, export that: buckeye export {quoted(run)}"
        raise _error(f"run {run} has no weights", hint, at)
    newest = str(weights[max(weights)])
    if (run / STATUS_FILE).exists() and read_record(run).actual_state() in ACTIVE_STATES:
        hint = f"wait for its end, or export a checkpoint: buckeye export {shlex.quote(name)}"
        raise _error(f"{name} is an active run, which deletes its weights, such as {newest}", hint, at)
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
        hint = "merge the adapter of a run into its model: buckeye export RUN --merge-lora"
        raise _error(f"{name} is an adapter, not a complete model", hint, at)
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
    problem = "is not a local directory, and cannot be downloaded from the Hugging Face hub"
    return _error(f"{name} {problem}: {first_line(error)}", download_hint(name), at)


def _error(message: str, hint: str, at: str | None) -> UsageError:
    return UsageError(message, code="BK-MODEL-NOT-FOUND", at=at, hint=hint)
