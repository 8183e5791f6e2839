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
from buckeye.errors import RunError, UsageError

if TYPE_CHECKING:
    from buckeye.mcp.tasks.task_schema import McpTask


def hf(
    tasks: Annotated[
        Path | None, typer.Argument(metavar="TASKS", help="JSON or JSON Lines. Default: tasks.json.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", "-n", metavar="ORG/NAME", help="What the dataset is called.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository a private one.")] = False,
    push: Annotated[bool, typer.Option("--push/--no-push", help="Upload it, or keep it here.")] = True,
    split: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=0.9, metavar="FRACTION", help="Share of the tasks that becomes the split test."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder. Default with --no-push: the name.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Replace what is there, without a question.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the tasks, and say what would be done.")
    ] = False,
) -> None:
    """Check tasks and make a dataset of them. A token for the hub comes from HF_TOKEN or `hf auth login`."""
    from buckeye.mcp.tasks.dataset_rows import check_portable, read_with_lock, split_tasks
    from buckeye.mcp.tasks.lock_file import read_lock

    path = tasks or _usual_file()
    if name is None:
        raise UsageError(f"--name is missing: what is the dataset called? As --name my-org/{path.stem}")
    check_name(name, push=push)
    lock_file = _lock_file(path)
    lock = read_lock(lock_file) if lock_file is not None else None
    found, inferred = read_with_lock(path, lock)
    check_portable(found, path)
    splits = split_tasks(found, split)
    folder = output or (None if push else Path(name))
    counts = ", ".join(f"{len(part)} {which}" for which, part in splits.items())
    typer.echo(f"{path}: {_tasks(len(found))} ({counts})")
    if inferred:
        typer.echo(f"mcp_config of {_tasks(inferred)}: {lock.image if lock else ''} (from {lock_file})")
    if split and len(splits) == 1:
        typer.echo(f"warning: --split {split:g} put no task into test: there are few tasks", err=True)
    if dry_run:
        _tell(name, folder, lock_file, push=push)
        return
    if folder is not None:
        _check_folder(folder, yes=yes)
    url = _made(name, splits, folder, private=private, push=push, yes=yes)
    typer.echo(url or f"{folder}: written")
    reference = name if push or folder is None else os.path.relpath(folder, (lock_file or path).parent)
    _note_in_lock(lock_file, reference, len(found))


def _made(
    name: str, splits: dict[str, list[McpTask]], folder: Path | None, *, private: bool, push: bool, yes: bool
) -> str | None:
    """Write the dataset, push it if requested, and return its URL on the hub, else None."""
    from buckeye.mcp.tasks.dataset import describe_archives, write_dataset

    repository = DatasetRepository(name, private=private) if push else None
    if repository is not None:
        typer.echo(f"{name}: {repository.visibility}")
        _agree(repository, yes=yes)
    with tempfile.TemporaryDirectory(prefix="buckeye-hf-") as temporary:
        place = folder or Path(temporary, "dataset")
        try:
            write_dataset(place, name, splits, replace=True)
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise UsageError(f"{place} cannot be written: {error.strerror}. Name another with -o") from None
        if files := describe_archives(place):
            typer.echo(f"files of the tasks: {files}")
        return repository.push(place) if repository is not None else None


def _usual_file() -> Path:
    from buckeye.mcp.tasks.task_files import TASK_FILES

    found = sorted({path for pattern in TASK_FILES for path in Path().glob(pattern)})
    if len(found) == 1:
        return found[0]
    names = ", ".join(map(str, found)) or f"none is called {TASK_FILES[0]} here"
    raise UsageError(
        f"which tasks? Name the file, as `buckeye hf tasks.json --name my-org/my-tasks` ({names})"
    )


def _tasks(count: int) -> str:
    return counted(count, "task")


def _lock_file(tasks: Path) -> Path | None:
    """Return the lock file next to the tasks, or in the working directory, or None."""
    from buckeye.mcp.tasks.lock_file import LOCK_FILE

    return next((path for path in (tasks.parent / LOCK_FILE, Path(LOCK_FILE)) if path.is_file()), None)


def _tell(name: str, folder: Path | None, lock_file: Path | None, *, push: bool) -> None:
    if folder is not None:
        typer.echo(f"would write the folder {folder}")
    if push:
        typer.echo(f"would push to {name}")
    if lock_file is not None:
        typer.echo(f"would note it in {lock_file}")


def _check_folder(folder: Path, *, yes: bool) -> None:
    """Raise UsageError unless the folder is new, or is a dataset that the user agrees to replace."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; the dataset is a folder. Name another with -o")
    inside = [path for path in folder.rglob("*") if path.is_file()]
    ours = (folder / "README.md", *folder.glob("files/*.tar.gz"))
    foreign = [path for path in inside if path.suffix != ".parquet" and path not in ours]
    if foreign:
        raise UsageError(
            f"{folder} has other files ({foreign[0]}); nothing of it is replaced. Name another with -o"
        )
    if not yes and not _confirmed(f"{folder} exists already. Replace it?"):
        raise UsageError(f"{folder} exists already. Add --yes to replace it, or name another folder with -o")


def _agree(repository: DatasetRepository, *, yes: bool) -> None:
    files = repository.files
    if (
        not files
        or yes
        or _confirmed(f"{repository.name} has {counted(len(files), 'file')}. Replace its data?")
    ):
        return
    raise UsageError(
        f"{repository.name} has {counted(len(files), 'file')} already. Add --yes to replace its data"
    )


def _confirmed(question: str) -> bool:
    """Return True if a user at a terminal agrees; False without a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty() and typer.confirm(question)


def _note_in_lock(lock_file: Path | None, reference: str, count: int) -> None:
    from buckeye.mcp.tasks.lock_file import LOCK_FILE, dataset_reference, update_lock

    if lock_file is None:
        typer.echo(f"There is no {LOCK_FILE} to note it in", err=True)
        return
    update_lock(lock_file, {"primary_dataset": dataset_reference(reference, count)})
    typer.echo(f"{lock_file}: primary_dataset is {reference}")


_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)


class DatasetRepository:
    """The dataset repository `org/name`, which may not exist yet.

    `files` are its files, or None if it does not exist. `private` is its visibility, current or future.
    Raises UsageError without a token, and if an existing repository is public but a private one is requested;
    RunError if the hub does not answer.
    """

    def __init__(self, name: str, *, private: bool) -> None:
        need("huggingface_hub", "Pushing to the Hugging Face hub")
        from huggingface_hub import HfApi, get_token

        token = key("HF_TOKEN") or get_token()
        if token is None:
            raise UsageError(
                "pushing needs a token that may write: `buckeye auth set HF_TOKEN`, or `hf auth login`. "
                "With --no-push the dataset stays here."
            )
        self.name = name
        self._api = HfApi(token=token)
        info = self._info()
        self.private = private if info is None else bool(info.private)
        self.files: list[str] | None = None if info is None else self._files()
        if private and not self.private:
            raise UsageError(
                f"--private: {name} is there already, and public. Make it private on the hub, or choose "
                "another --name."
            )

    @property
    def visibility(self) -> str:
        """Text that describes who will see the dataset."""
        kind = "private" if self.private else "public"
        if self.files is not None:
            return f"there already, {kind}"
        return f"new, {kind}" + ("" if self.private else "; --private changes that")

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
            raise RunError(
                f"pushing to {self.name} failed: {_reason(error)}\nThe same command tries it again."
            ) from error
        return str(url)

    def _info(self) -> Any:
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            return self._api.dataset_info(self.name)
        except RepositoryNotFoundError:
            return None
        except Exception as error:
            raise RunError(f"the hub could not be asked for {self.name}: {_reason(error)}") from error

    def _files(self) -> list[str]:
        try:
            files = self._api.list_repo_files(self.name, repo_type="dataset")
        except Exception as error:
            raise RunError(f"the hub could not be asked for {self.name}: {_reason(error)}") from error
        return sorted(set(files) - {".gitattributes"})


def check_name(name: str, *, push: bool) -> None:
    """Raise UsageError for a name that the hub would reject, or that is not a valid folder name."""
    if push and not _NAME.fullmatch(name):
        raise UsageError(
            f"--name {name}: write the name of a dataset on the hub as ORG/NAME, or add --no-push"
        )
    if not re.fullmatch(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?", name, re.ASCII):
        raise UsageError(f"--name {name}: use letters, digits, hyphens, dots, and at most one slash")


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


COMMANDS = {"hf": hf}
