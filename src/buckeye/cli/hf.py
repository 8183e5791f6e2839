"""`buckeye hf`: publish a file of tasks as a dataset, on the Hugging Face hub or in a folder."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buckeye.base.columns import counted
from buckeye.base.hub import HubRepository, is_hub_name
from buckeye.cli.errors import write_error
from buckeye.errors import UsageError

if TYPE_CHECKING:
    from buckeye.mcp.tasks.task_schema import McpTask


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
    """Check tasks and publish them as a dataset. The token comes from HF_TOKEN or `hf auth login`."""
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
        typer.echo(f"added mcp_config to {counted(inferred, 'task')}: image {image} (from {lock_file})")
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
    """Write the dataset, and push it if `push` is set. Return its URL on the hub, or None if not pushed."""
    from buckeye.mcp.tasks.dataset import describe_archives, write_dataset

    repository = HubRepository(name, "dataset", private=private) if push else None
    if repository is not None:
        typer.echo(f"{name}: {repository.visibility}")
        _confirm_replacing(repository, yes=yes)
    with tempfile.TemporaryDirectory(prefix="buckeye-hf-") as temporary:
        target = folder or Path(temporary, "dataset")
        try:
            write_dataset(target, name, splits)
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise write_error(target, error, hint="Name another folder with -o") from None
        if files := describe_archives(target):
            typer.echo(f"files of the tasks: {files}")
        if repository is None:
            return None
        replaced = ("data/*.parquet", "files/*.tar.gz")
        return repository.push(target, "Tasks written by Buckeye", replaced=replaced)


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
        typer.echo(f"would record the dataset in {lock_file}")


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
        message = (
            f"{folder} is not replaced: it has files that do not belong to a dataset, such as {others[0]}"
        )
        raise UsageError(message, code="BK-FILE-EXISTS", hint="Name another folder with -o")
    if not yes and not _confirm(f"{folder} exists. Replace it?"):
        hint = "Add --yes to replace it, or name another folder with -o"
        raise UsageError(f"{folder} exists", code="BK-FILE-EXISTS", hint=hint)


def _confirm_replacing(repository: HubRepository, *, yes: bool) -> None:
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


def check_name(name: str, *, push: bool) -> None:
    """Raise UsageError for a name that the hub would reject, or that is not a valid folder name."""
    if push and not is_hub_name(name):
        message = f"--name: {name!r} is not the name of a dataset on the hub"
        raise UsageError(message, code="BK-CLI-ARGUMENT", hint="Write it as ORG/NAME, or add --no-push")
    if not re.fullmatch(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?", name, re.ASCII):
        hint = "Use letters, digits, hyphens, dots, and at most one slash"
        raise UsageError(f"--name: {name!r} is not a valid name", code="BK-CLI-ARGUMENT", hint=hint)
