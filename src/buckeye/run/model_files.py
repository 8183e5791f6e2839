"""Where a model's files are: a local directory, or the Hugging Face cache, or not here yet."""

from __future__ import annotations

from pathlib import Path

from buckeye.checkpoint.merge import MODEL_DIRECTORY, complete_model
from buckeye.errors import UsageError
from buckeye.tasks.keys import key


def find_model(name: str) -> Path | None:
    """The local directory of a model, without any network; None if it would have to be downloaded."""
    if (Path(name) / "config.json").is_file():
        return Path(name).resolve()
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name, local_files_only=True)).resolve()
    except Exception:  # the hub's errors for "not cached" and "not a valid id" differ between its versions
        return None


def fetch_model(name: str) -> Path:
    """The local directory of a model, downloaded from the Hugging Face hub if need be; of a checkpoint that
    was written as shards, put together.

    Raises UsageError if it is neither here nor there.
    """
    found = find_model(name)
    if found is not None:
        return complete_model(found.parent) if found.name == MODEL_DIRECTORY else found
    if (Path(name) / "adapter_config.json").is_file():
        raise UsageError(
            f"model.name: {name} is an adapter and no complete model; `buckeye export RUN --merge-lora` "
            "writes the model of a run that trained one."
        )
    if Path(name).exists() or name.startswith((".", "/", "~")):
        raise UsageError(f"model.name: {name} is not a model directory (it has no config.json).")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UsageError("Training needs the `train` extra: pip install 'buckeye[train]'") from None
    try:
        return Path(
            snapshot_download(
                name,
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
