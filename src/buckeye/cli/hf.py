"""`buckeye hf`: publish a file of tasks as a dataset, on the Hugging Face hub or in a folder."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buckeye.base.columns import counted
from buckeye.base.distribution import need
from buckeye.base.keys import key
from buckeye.cli.errors import write_error
from buckeye.errors import RunError, UsageError

if TYPE_CHECKING:
    from buckeye.mcp.tasks.task_schema import McpTask

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)


def hf(
    tasks: Annotated[
        Path | None, typer.Argument(metavar="TASKS", help="JSON or JSON Lines file. Default: tasks.json.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", "-n", metavar="ORG/NAME", help="Name of the dataset.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create the repository as private.")] = False,
    push: Annotated[
        bool, typer.Option("--push/--no-push", help="Upload the dataset, or only write a folder.")
    ] = True,
    split: Annotated[
        float | None,
        typer.Option(min=0.0, max=0.9, metavar="FRACTION", help="Share of the tasks for the split `test`."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write. Default with --no-push: NAME.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Replace existing data without a prompt.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the tasks and show the actions; write nothing.")
    ] = False,
) -> None:
    """Check tasks and publish them as a dataset. The hub's token is HF_TOKEN, or from `hf auth login`."""
    from buckeye.mcp.tasks.dataset_rows import check_portable, read_with_lock, split_tasks
    from buckeye.mcp.tasks.lock_file import read_lock

    path = tasks or _default_file()
    if name is None:
        hint = f"Name the dataset: --name my-org/{path.stem}"
        raise UsageError("--name is missing", code="BK-CLI-MISSING", hint=hint)
    check_name(name, push=push)
    lock_file = _lock_file(path)
    lock = read_lock(lock_file) if lock_file is not None else None
    rows, inferred = read_with_lock(path, lock)
    check_portable(rows, path)
    splits = split_tasks(rows, split)
    folder = output or (None if push else Path(name))
    counts = ", ".join(f"{len(part)} {split_name}" for split_name, part in splits.items())
    typer.echo(f"{path}: {counted(len(rows), 'task')} ({counts})")
    if inferred:
        image = lock.image if lock else ""
        typer.echo(f"mcp_config of {counted(inferred, 'task')}: {image} (from {lock_file})")
    if split and len(splits) == 1:
        warning = f"--split {split:g} of {counted(len(rows), 'task')} is 0 tasks: no split `test`"
        typer.echo(f"warning: {warning}", err=True)
    if dry_run:
        _show_actions(name, folder, lock_file, push=push)
        return
    if folder is not None:
        _check_folder(folder, yes=yes)
    url = _write_and_push(name, splits, folder, private=private, push=push, yes=yes)
    typer.echo(url or f"{folder}: written")
    reference = name if push or folder is None else os.path.relpath(folder, (lock_file or path).parent)
    _record_in_lock(lock_file, reference, len(rows))


def _write_and_push(
    name: str, splits: dict[str, list[McpTask]], folder: Path | None, *, private: bool, push: bool, yes: bool
) -> str | None:
    """Write the dataset, push it if requested, and return its URL on the hub, else None."""
    from buckeye.mcp.tasks.dataset import describe_archives, write_dataset

    repository = DatasetRepository(name, private=private) if push else None
    if repository is not None:
        typer.echo(f"{name}: {repository.visibility}")
        _confirm_replacing(repository, yes=yes)
    with tempfile.TemporaryDirectory(prefix="buckeye-hf-") as temporary:
        target = folder or Path(temporary, "dataset")
        try:
            write_dataset(target, name, splits, replace=True)
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise write_error(target, error, hint="Name another folder with -o") from None
        if files := describe_archives(target):
            typer.echo(f"files of the tasks: {files}")
        return repository.push(target) if repository is not None else None


def _default_file() -> Path:
    from buckeye.mcp.tasks.task_files import TASK_FILES

    files = sorted({path for pattern in TASK_FILES for path in Path().glob(pattern)})
    if len(files) == 1:
        return files[0]
    message = f"several task files found: {', '.join(map(str, files))}"
    raise UsageError(
        message if files else f"no {TASK_FILES[0]} found in {Path.cwd()}",
        code="BK-CLI-MISSING",
        hint="Name the file: `buckeye hf tasks.json --name my-org/my-tasks`",
    )


def _lock_file(tasks: Path) -> Path | None:
    """Return the lock file next to the tasks, or in the working directory, or None."""
    from buckeye.mcp.tasks.lock_file import LOCK_FILE

    return next((path for path in (tasks.parent / LOCK_FILE, Path(LOCK_FILE)) if path.is_file()), None)


def _show_actions(name: str, folder: Path | None, lock_file: Path | None, *, push: bool) -> None:
    if folder is not None:
        typer.echo(f"would write the folder {folder}")
    if push:
        typer.echo(f"would push to {name}")
    if lock_file is not None:
        typer.echo(f"would record it in {lock_file}")


def _check_folder(folder: Path, *, yes: bool) -> None:
    """Raise UsageError unless the folder is new, or is a dataset that the user agrees to replace."""
    if not folder.exists():
        return
    if not folder.is_dir():
        hint = "Name a folder with -o"
        raise UsageError(f"{folder} is a file, and a dataset is a folder", code="BK-FILE-EXISTS", hint=hint)
    files = [path for path in folder.rglob("*") if path.is_file()]
    dataset_files = (folder / "README.md", *folder.glob("files/*.tar.gz"))
    others = [path for path in files if path.suffix != ".parquet" and path not in dataset_files]
    if others:
        message = f"{folder} has files that are not of a dataset, and is not replaced: {others[0]}"
        raise UsageError(message, code="BK-FILE-EXISTS", hint="Name another folder with -o")
    if not yes and not _confirm(f"{folder} exists. Replace it?"):
        hint = "Add --yes to replace it, or name another folder with -o"
        raise UsageError(f"{folder} exists", code="BK-FILE-EXISTS", hint=hint)


def _confirm_replacing(repository: DatasetRepository, *, yes: bool) -> None:
    if not repository.files or yes:
        return
    message = f"{repository.name} has {counted(len(repository.files), 'file')}"
    if not _confirm(f"{message}. Replace its data?"):
        raise UsageError(message, code="BK-CLI-CONFIRM", hint="Add --yes to replace its data")


def _confirm(question: str) -> bool:
    """Return True if a user at a terminal agrees; False without a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty() and typer.confirm(question)


def _record_in_lock(lock_file: Path | None, reference: str, count: int) -> None:
    from buckeye.mcp.tasks.lock_file import LOCK_FILE, dataset_reference, update_lock

    if lock_file is None:
        typer.echo(f"note: no {LOCK_FILE} found, so the dataset is not recorded", err=True)
        return
    update_lock(lock_file, {"primary_dataset": dataset_reference(reference, count)})
    typer.echo(f"{lock_file}: primary_dataset is {reference}")


class DatasetRepository:
    """The dataset repository `org/name`, which may not exist yet.

    `files` are its files, or None if it does not exist. `private` is its visibility, current or future.
    Raises UsageError without a token, and if an existing repository is public but a private one is requested;
    RunError if the hub does not reply.
    """

    def __init__(self, name: str, *, private: bool) -> None:
        need("huggingface_hub", "Pushing to the Hugging Face hub")
        from huggingface_hub import HfApi, get_token

        token = key("HF_TOKEN") or get_token()
        if token is None:
            raise UsageError(
                "pushing to the Hugging Face hub: no token with the right to write",
                code="BK-KEY-MISSING",
                hint="Store one: `buckeye auth set HF_TOKEN` or `hf auth login`; or add --no-push",
            )
        self.name = name
        self._api = HfApi(token=token)
        info = self._info()
        self.private = private if info is None else bool(info.private)
        self.files: list[str] | None = None if info is None else self._files()
        if private and not self.private:
            raise UsageError(
                f"--private: {name} exists and is public",
                code="BK-CLI-CONFLICT",
                hint="Make it private on the hub, or choose another --name",
            )

    @property
    def visibility(self) -> str:
        """Text that describes who will see the dataset."""
        kind = "private" if self.private else "public"
        if self.files is not None:
            return f"existing, {kind}"
        return f"new, {kind}" + ("" if self.private else "; add --private to change that")

    def push(self, folder: Path) -> str:
        """Upload the folder in one commit, creating the repository if necessary; return its URL.

        Data files that are not in the folder are removed from the repository.
        """
        try:
            url = self._api.create_repo(self.name, repo_type="dataset", private=self.private, exist_ok=True)
            self._api.upload_folder(
                repo_id=self.name,
                repo_type="dataset",
                folder_path=folder,
                commit_message="Tasks written by Buckeye",
                delete_patterns=["data/*.parquet", "files/*.tar.gz"],
            )
        except Exception as error:  # network, permissions, quota: the hub's errors vary
            message = f"pushing to {self.name} failed: {_first_line(error)}"
            raise RunError(message, code="BK-HUB", hint="Retry with the same command") from error
        return str(url)

    def _info(self) -> Any:
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            return self._api.dataset_info(self.name)
        except RepositoryNotFoundError:
            return None
        except Exception as error:
            raise self._request_error(error) from error

    def _files(self) -> list[str]:
        try:
            files = self._api.list_repo_files(self.name, repo_type="dataset")
        except Exception as error:
            raise self._request_error(error) from error
        return sorted(set(files) - {".gitattributes"})

    def _request_error(self, error: Exception) -> RunError:
        return RunError(f"request to the hub for {self.name} failed: {_first_line(error)}", code="BK-HUB")


def check_name(name: str, *, push: bool) -> None:
    """Raise UsageError for a name that the hub would reject, or that is not a valid folder name."""
    if push and not _NAME.fullmatch(name):
        message = f"--name: {name!r} is not the name of a dataset on the hub"
        raise UsageError(message, code="BK-CLI-ARGUMENT", hint="Write it as ORG/NAME, or add --no-push")
    if not re.fullmatch(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?", name, re.ASCII):
        hint = "Use letters, digits, hyphens, dots, and at most one slash"
        raise UsageError(f"--name: {name!r} is not a valid name", code="BK-CLI-ARGUMENT", hint=hint)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


COMMANDS = {"hf": hf}
