"""Where a model's files are: a local directory, or the Hugging Face cache, or not here yet."""

from __future__ import annotations

from pathlib import Path

from buckeye.base.distribution import need
from buckeye.base.keys import key
from buckeye.base.storage import read_json
from buckeye.errors import UsageError

_ADAPTER = "adapter_config.json"


def find_model(name: str, revision: str | None = None) -> Path | None:
    """The local directory of a model, without any network; None if it would have to be downloaded."""
    if (Path(name) / "config.json").is_file():
        return Path(name).resolve()
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True)).resolve()
    except Exception:  # the hub's errors for "not cached" and "not a valid id" differ between its versions
        return None


def revision_of(model: Path) -> str | None:
    """The revision of a model in the cache of the hub; None for a directory elsewhere."""
    return model.name if model.parent.name == "snapshots" else None


def is_adapter(name: str) -> bool:
    """Whether a model's name is a directory with an adapter in peft's format, and no complete model."""
    folder = Path(name)
    return (folder / _ADAPTER).is_file() and not (folder / "config.json").is_file()


def fetch_base(adapter: Path) -> Path:
    """The local directory of the model that an adapter belongs to, downloaded if need be. Raises UsageError
    if it is neither here nor there, or the adapter does not say which it is."""
    try:
        content = read_json(adapter / _ADAPTER)
        base, revision = content["base_model_name_or_path"], content.get("revision")
        if not isinstance(base, str) or not isinstance(revision, str | None):
            raise ValueError("base_model_name_or_path and revision must be texts")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{adapter / _ADAPTER} does not say which model it belongs to ({error!r})."
        ) from None
    return fetch_model(base, revision)


def fetch_served(name: str) -> Path:
    """As `fetch_model`, of what can be served: of an adapter its own directory, once its base is here."""
    if not is_adapter(name):
        return fetch_model(name)
    fetch_base(Path(name))
    return Path(name).resolve()


def fetch_model(name: str, revision: str | None = None) -> Path:
    """The local directory of a model, downloaded from the Hugging Face hub if need be; of a checkpoint that
    was written as shards, put together.

    Raises UsageError if it is neither here nor there, and where nothing can be done with a model.
    """
    need("torch", f"A model ({name})")
    found = find_model(name, revision)
    if found is not None:
        from buckeye.transport.checkpoint.shards import MODEL_DIRECTORY, complete_model

        return complete_model(found.parent) if found.name == MODEL_DIRECTORY else found
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
    except Exception as error:  # network, authentication, unknown id: one message whatever the library raises
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"model.name: {name} is not a directory here, and fetching it from the Hugging Face hub "
            f"failed: {reason}"
        ) from None
