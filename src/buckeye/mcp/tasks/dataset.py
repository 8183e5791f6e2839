"""Read and write datasets of tasks: folders with a parquet file per split and a card (README.md)."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from buckeye.base.disk import human_bytes
from buckeye.base.distribution import need
from buckeye.base.hub import is_hub_name
from buckeye.base.keys import key
from buckeye.base.storage import sha256_file, write_directory
from buckeye.errors import UsageError, first_line
from buckeye.mcp.tasks.dataset_rows import COLUMNS, FILES, GRADE, NESTED, TEST, TRAIN, as_row
from buckeye.mcp.tasks.task_files import read_rows, read_tasks
from buckeye.mcp.tasks.task_schema import HttpServer, McpTask
from buckeye.mcp.tasks.variables import find_server_variables
from buckeye.mcp.workdir.initial_files import SizeLimit, pack_files, resolve_files

log = logging.getLogger(__name__)

CARD = "README.md"
MAX_FILES_BYTES = 2**30
"""Maximum bytes of all archives of a dataset together, and of the unpacked content of one archive."""
_FOLDER = "data"
_ARCHIVE = re.compile(rf"{FILES}/([0-9a-f]{{64}})\.tar\.gz")
"""Path of an archive with the files of a task, relative to the dataset's folder. Its name is its SHA-256."""
_ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""Suffixes of the files to download if a hub dataset has no parquet files."""
_FILE_SUFFIXES = (*_ROW_SUFFIXES, ".parquet")
_MAX_DOWNLOAD_BYTES = 4 * 2**30
_EVAL_PREFIXES = (TEST, "eval", "validation")
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


def write_dataset(folder: Path, name: str, splits: Mapping[str, Sequence[McpTask]]) -> None:
    """Write a dataset's folder atomically. Pack the `files` of tasks into archives.

    Replace an existing folder. Raises UsageError if pyarrow is not installed or if files cannot be packed.
    """
    pyarrow, parquet = _pyarrow()
    all_tasks = [task for tasks in splits.values() for task in tasks]
    extra = [name for name in (GRADE, FILES) if any(getattr(task, name) for task in all_tasks)]
    columns = [*COLUMNS, *extra]
    schema = pyarrow.schema([(column, pyarrow.string()) for column in columns])

    def fill(temporary: Path) -> None:
        (temporary / _FOLDER).mkdir()
        archives = _pack_archives(all_tasks, temporary / FILES)
        for split, tasks in splits.items():
            packed = [task.model_copy(update={FILES: archives.get(task.files)}) for task in tasks]
            table = pyarrow.Table.from_pylist([as_row(task) for task in packed], schema=schema)
            parquet.write_table(table, temporary / _FOLDER / f"{split}-00000-of-00001.parquet")
        card = dataset_card(name, splits, describe_archives(temporary))
        (temporary / CARD).write_text(card, encoding="utf-8")

    write_directory(folder, fill, replace=True)


def _pack_archives(tasks: Sequence[McpTask], folder: Path) -> dict[str | None, str]:
    """Pack the `files` of tasks into archives in `folder`. Return the archive's path for each `files`."""
    sources = sorted({task.files for task in tasks if task.files is not None})
    if sources:
        folder.mkdir()
    archives: dict[str | None, str] = {}
    for files in sources:
        archives[files] = f"{FILES}/{pack_files(files, folder, SizeLimit(MAX_FILES_BYTES))}"
        size = sum(path.stat().st_size for path in folder.iterdir())
        if size > MAX_FILES_BYTES:
            raise _error(
                f"files of the tasks are too large: {human_bytes(size)} packed, up to {files}; the limit is "
                f"{human_bytes(MAX_FILES_BYTES)}",
                "set `files` of the configuration to a script that creates them",
            )
    return archives


def describe_archives(folder: Path) -> str:
    """Return the number and size of a dataset's archives as text, or "" without archives."""
    sizes = [path.stat().st_size for path in sorted(folder.glob(f"{FILES}/*.tar.gz"))]
    return f"archives: {len(sizes)}, {human_bytes(sum(sizes))}" if sizes else ""


def find_taskset(name: str, subset: str = "") -> Path:
    """Return the path of a taskset: a local file or folder, or a Hugging Face dataset ORG/NAME.

    Download the dataset, or only the files in its folder `subset`. If the hub cannot be reached, return the
    downloaded dataset. Raises UsageError if the dataset is not found, is too large, or cannot be downloaded.
    """
    if not is_hub_dataset(name):
        return Path(os.path.expanduser(name))
    need("huggingface_hub", f"{name} is not a path in {Path.cwd()}; a dataset of the Hugging Face hub")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        if constants.HF_HUB_OFFLINE:
            return downloaded_dataset(name, subset)
        patterns = hub_files(name, subset)
        token = key("HF_TOKEN") or None
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns, token=token))
    except UsageError:
        raise
    except Exception as error:  # no network, no permission, an unknown name: the hub's errors vary
        if not isinstance(error, HfHubHTTPError):  # the hub has not replied
            with suppress(UsageError):
                path = downloaded_dataset(name, subset)
                log.warning("%s: using the downloaded dataset: %s", name, first_line(error))
                return path
        raise UsageError(
            f"cannot download dataset {name} from the Hugging Face hub: {first_line(error)}",
            code="BK-DATA-NOT-FOUND",
            hint=f"check the name; {Path.cwd()} has no path {name} either",
        ) from None


def is_hub_dataset(name: str) -> bool:
    """Return True if `name` is not a path, but the name of a dataset on the Hugging Face hub."""
    path = Path(os.path.expanduser(name))
    return not path.exists() and is_hub_name(name) and path.suffix not in _FILE_SUFFIXES


def hub_files(name: str, subset: str = "") -> list[str]:
    """Return the files of a hub dataset that `find_taskset` downloads.

    Raises UsageError if they are too large, and errors of the hub's library.
    """
    from huggingface_hub import HfApi

    files = HfApi(token=key("HF_TOKEN") or None).dataset_info(name, files_metadata=True).siblings or ()
    return _files_to_download(name, {file.rfilename: file.size or 0 for file in files}, subset)


def downloaded_dataset(name: str, subset: str) -> Path:
    """Return the folder of a dataset that was downloaded in full. Raises UsageError without one."""
    from huggingface_hub import snapshot_download

    try:
        patterns = _listed_files(name, subset)
        return Path(
            snapshot_download(name, repo_type="dataset", allow_patterns=patterns, local_files_only=True)
        )
    except Exception as error:  # the hub's errors for "not cached" and "incomplete" differ between versions
        raise UsageError(
            f"dataset {name} is not complete in the local cache, and downloads are off (HF_HUB_OFFLINE, "
            "--dry-run or --offline)",
            code="BK-OFFLINE",
            hint="run `buckeye fetch` with the configuration of the run; "
            f"{Path.cwd()} has no path {name} either",
        ) from error


def _listed_files(name: str, subset: str) -> list[str] | None:
    """Return the files to download, from the list that a download left in the cache; None without a list."""
    try:
        from huggingface_hub import get_cached_repo_tree
    except ImportError:  # older versions keep no list
        return None
    try:
        files = get_cached_repo_tree(name, repo_type="dataset")
    except Exception:
        return None
    return _files_to_download(name, {file.path: file.size for file in files}, subset)


def _files_to_download(name: str, sizes: Mapping[str, int], subset: str) -> list[str]:
    """Return the files of a hub dataset to download. Raises UsageError if they are too large."""
    archives = [file for file in sizes if file.startswith(f"{FILES}/") and file.endswith(".tar.gz")]
    rows = [file for file in sizes if file.startswith(f"{subset}/" if subset else "")]
    rows = [file for file in rows if file.endswith(".parquet")] or [
        file for file in rows if file.endswith(_ROW_SUFFIXES)
    ]
    for kind, files, limit in (("archives", archives, MAX_FILES_BYTES), ("rows", rows, _MAX_DOWNLOAD_BYTES)):
        if (size := sum(sizes[file] for file in files)) > limit:
            raise _error(
                f"{kind} of dataset {name} are too large: {human_bytes(size)}; the limit is "
                f"{human_bytes(limit)}",
                "use a smaller dataset, or a folder of it: ORG/NAME/FOLDER",
            )
    return [glob.escape(file) for file in [*rows, *archives]]


def is_dataset(path: Path) -> bool:
    """Return True if the path is a folder or a parquet file, and False for a JSON file."""
    return path.is_dir() or path.suffix == ".parquet"


def read_splits(path: Path) -> tuple[list[McpTask], list[McpTask]]:
    """Return the training tasks and the held-out tasks of a JSON file or a dataset.

    Held-out tasks are the split `test` of a dataset, and tasks with `"split": "eval"` in their metadata.
    Raises UsageError.
    """
    if is_dataset(path):
        splits = read_dataset(path)
        tasks, held_out = splits.get(TRAIN, []), splits.get(TEST, [])
    else:
        tasks, held_out = read_tasks(path), []
    eval_tasks = [task for task in tasks if task.metadata.get("split") == "eval"]
    return [task for task in tasks if task.metadata.get("split") != "eval"], held_out + eval_tasks


def read_dataset(path: Path) -> dict[str, list[McpTask]]:
    """Return the tasks of a parquet file, or of all parquet files in a folder, by split `train` and `test`.

    In a folder, files whose names begin with test, eval or validation are the split `test`. Raises UsageError
    with every problem of the tasks.
    """
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        hint = "pass a folder that `buckeye hf` wrote, or a JSON file"
        raise _error(f"{path} has no parquet files", hint)
    rows: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        held_out = path.is_dir() and file.name.startswith(_EVAL_PREFIXES)
        rows.setdefault(TEST if held_out else TRAIN, []).extend(_read_parquet(file))
    tasks_by_split = {
        split: read_rows(part, f"{path} ({split})") for split, part in sorted(rows.items(), reverse=True)
    }
    folder = path if path.is_dir() else path.absolute().parent.parent
    all_tasks = [task for tasks in tasks_by_split.values() for task in tasks]
    archives = {task.files: task.id for task in all_tasks if task.files is not None}
    for archive, task_id in archives.items():
        _check_archive(folder, archive, f"{path}: task {task_id} (files)")
    return {
        split: [resolve_files(task, folder / CARD) for task in tasks]
        for split, tasks in tasks_by_split.items()
    }


def _check_archive(folder: Path, files: str, where: str) -> None:
    """Raise UsageError unless `files` is an archive of the dataset with the hash in its name."""
    match = _ARCHIVE.fullmatch(files)
    if match is None:
        hint = "write it as files/<SHA-256>.tar.gz, as `buckeye hf` does"
        raise _error(f"{files[:200]!r} is not an archive of the dataset", hint, at=where)
    path = folder / files
    is_complete = path.is_file() and path.stat().st_size <= MAX_FILES_BYTES
    if not is_complete or sha256_file(path) != match[1]:
        problem = f"{path} is missing or damaged (its name must be its SHA-256)"
        raise _error(problem, "download the dataset again", at=where)


def is_archive(files: str) -> bool:
    """Return True if the path `files` has the form of an archive in a dataset."""
    return _ARCHIVE.fullmatch("/".join(Path(files).parts[-2:])) is not None


def dataset_card(name: str, splits: Mapping[str, Sequence[McpTask]], files: str = "") -> str:
    """Return the README.md of a dataset. It only depends on the arguments, so equal tasks give equal text."""
    all_tasks = [task for tasks in splits.values() for task in tasks]
    size = next((label for limit, label in _SIZES if len(all_tasks) < limit), "n>1M")
    head = [
        "---",
        "configs:",
        "- config_name: default",
        "  data_files:",
        *(line for split in splits for line in (f"  - split: {split}", f"    path: {_FOLDER}/{split}-*")),
        "size_categories:",
        f"- {size}",
        "tags:",
        "- mcp",
        "- reinforcement-learning",
        "---",
    ]
    counts = ", ".join(f"{len(tasks)} {split}" for split, tasks in splits.items())
    lines = [
        f"# {name}",
        "",
        "Tasks for language-model agents that act in MCP environments, made with Buckeye.",
        "",
        "| | |",
        "|---|---|",
        f"| tasks | {counts} |",
        f"| environments | {_format_names(_list_servers(all_tasks))} |",
        f"| prepared by | {_format_names(call.name for task in all_tasks for call in task.setup_tool)} |",
        f"| graded by | {_format_names(name for task in all_tasks for name in _list_graders(task))} |",
        f"| variables | {_format_names(find_server_variables(all_tasks))} |",
        f"| files | {files or 'none'} |",
        f"| longest prompt | {max(len(task.prompt) for task in all_tasks)} characters |",
        "",
        f"The columns {', '.join(f'`{column}`' for column in NESTED)} hold JSON texts, or null.",
        "Variables are resolved on the machine that runs a task; the dataset does not contain their values.",
        "",
    ]
    return "\n".join([*head, *lines])


def find_images(tasks: Sequence[McpTask]) -> tuple[str, ...]:
    """Return the distinct images that the tasks request from a gateway with the header `Mcp-Image`."""
    servers = [server for task in tasks for server in task.mcp_config.values()]
    images = [image for server in servers if isinstance(server, HttpServer) for image in _images(server)]
    return tuple(dict.fromkeys(images))


def _images(server: HttpServer) -> list[str]:
    return [value for name, value in server.headers.items() if name.lower() == "mcp-image"]


def _list_graders(task: McpTask) -> list[str]:
    return [call.name for call in task.evaluate_tool] + [f"grade.{grader.name}" for grader in task.grade]


def _list_servers(tasks: Sequence[McpTask]) -> list[str]:
    names = []
    for task in tasks:
        for server in task.mcp_config.values():
            if isinstance(server, HttpServer):
                names += _images(server) or [server.url]
            else:
                names.append(server.command)
    return names


def _format_names(names: Iterable[str]) -> str:
    """Return the ten most frequent names as a cell of a Markdown table."""
    counted = sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))
    shown = [f"`{name}`".replace("|", "\\|").replace("\n", " ") for name, _ in counted[:10]]
    return ", ".join(shown) + (f" and {len(counted) - 10} more" if len(counted) > 10 else "") or "none"


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    _, parquet = _pyarrow()
    try:
        rows: list[dict[str, Any]] = parquet.ParquetFile(file).read().to_pylist()
    except FileNotFoundError:
        raise UsageError(
            f"no such file: {file}",
            code="BK-DATA-NOT-FOUND",
            hint=f"check the path (current directory: {Path.cwd()})",
        ) from None
    except Exception as error:  # any error of pyarrow means that the file is invalid
        reason = " ".join(str(error).split())[:200]
        problem = f"{file} is not a valid parquet file: {reason}"
        raise _error(problem, "write the dataset again with `buckeye hf`") from None
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def _error(message: str, hint: str, *, at: str | None = None) -> UsageError:
    return UsageError(message, code="BK-DATA-FORMAT", at=at, hint=hint)


def _pyarrow() -> tuple[Any, Any]:
    need("pyarrow", "a parquet dataset")
    import pyarrow
    import pyarrow.parquet

    return pyarrow, pyarrow.parquet
