"""Functions that write a model directory in Hugging Face's format, and read and write tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import CHAT_TEMPLATE_DIR, list_repo_templates

from buckeye.base.foreign_files import NotRegularFileError, list_regular_files, read_regular
from buckeye.errors import UsageError
from buckeye.trainer.parallel.fsdp import gather_tensors

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def read_tokenizer_files(name: str) -> dict[str, bytes]:
    """Return names and contents of the tokenizer files and chat templates of a model directory or hub name.

    The contents are in memory, because the directory may be a checkpoint that is deleted later. Raise
    `UsageError` for a link to a file outside the directory.
    """
    folder = Path(name)
    if folder.is_dir():
        try:
            paths = {path.relative_to(folder).as_posix(): path for path in list_regular_files(folder)}
            return {file: read_regular(path) for file, path in paths.items() if _is_tokenizer_file(file)}
        except NotRegularFileError as error:
            raise UsageError(
                f"the tokenizer cannot be copied: {error}",
                code="BK-FILE-UNREADABLE",
                hint="replace the link by the file",
            ) from None
    templates = [
        f"{CHAT_TEMPLATE_DIR}/{stem}.jinja" for stem in list_repo_templates(name, local_files_only=True)
    ]
    cached = {
        file: cached_file(name, file, local_files_only=True, _raise_exceptions_for_missing_entries=False)
        for file in (*_TOKENIZER_FILES, *templates)
    }
    return {file: Path(path).read_bytes() for file, path in cached.items() if path}


def write_tokenizer_files(directory: Path, contents: Mapping[str, bytes]) -> None:
    """Write files with the given names and contents, as `read_tokenizer_files` returns them."""
    for name, content in contents.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def save_model(
    model: PreTrainedModel,
    tokenizer: Mapping[str, bytes],
    directory: Path,
    *,
    dtype: torch.dtype,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write `model` to `directory`: weights, configuration, generation configuration and tokenizer files.

    Floating-point tensors are stored as `dtype`. If the model is sharded, `tensors` must have its tensors,
    gathered and converted to `dtype`. The weights are files of up to 256 MB, which can be hashed in parallel.
    """
    if tensors is None:
        tensors = gather_tensors(model.state_dict(keep_vars=True), keep=True, dtype=dtype)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory, state_dict=dict(tensors), max_shard_size="256MB")
    _write_dtype(directory / "config.json", dtype)
    write_tokenizer_files(directory, tokenizer)


def _is_tokenizer_file(file: str) -> bool:
    folder, _, name = file.rpartition("/")
    return file in _TOKENIZER_FILES or (folder == CHAT_TEMPLATE_DIR and name.endswith(".jinja"))


def _write_dtype(config: Path, dtype: torch.dtype) -> None:
    # transformers writes the dtype of the parameters in memory, which may differ from the stored dtype
    content = json.loads(config.read_text(encoding="utf-8"))
    content["dtype"] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
