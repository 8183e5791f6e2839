"""Download the files of a remote run. New content is appended to logs; other changed files are replaced."""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from buckeye.base.disk import free_bytes, human_bytes
from buckeye.base.storage import remove_directory, write_directory, write_file, write_link
from buckeye.errors import CheckpointError, RemoteError
from buckeye.remote.received_files import (
    CLEANED_RECORDS,
    MAX_FILES,
    clean_record,
    is_fetched_file,
    is_fetched_last,
    is_fetched_link,
    stays_on_machine,
)
from buckeye.transport.checkpoint import COMMITTED, CheckpointInfo, read_commit, verify_checkpoint

CHUNK_BYTES = 4 * 2**20
_GROWING = (".jsonl", ".log", ".stdout", ".stderr")
_SMALL = 16 * 2**20  # larger files, except logs, are downloaded at the end of the run
_STEPS = ("checkpoints", "weights")
_MAX_FILE_BYTES = 2**44
_RESERVE = 2**30  # bytes of the local disk that stay free


AgentRequest = Callable[..., Awaitable[tuple[dict[str, Any], bytes]]]
"""Signature of `AgentClient.request`, which sends a request to the other machine."""


class RemoteFile(msgspec.Struct, frozen=True, array_like=True):
    """File of the remote run.

    `path` is relative to the run directory, `size` is in bytes, `changed` is the modification time in ns, and
    `link` is the target of a symbolic link, or None for other files.
    """

    path: str
    size: Annotated[int, msgspec.Meta(ge=0, le=_MAX_FILE_BYTES)]
    changed: int
    link: str | None = None


def parse_listing(files: Any) -> list[RemoteFile]:
    """Return the files that an agent lists.

    Raises RemoteError for an invalid list, and for a path outside of the run directory. It does not check the
    targets of links, because W&B creates a link to its cache in every run; `is_fetched_link` checks them.
    """
    if not isinstance(files, list) or len(files) > MAX_FILES:
        raise _list_error(f"no files, or more than {MAX_FILES}")
    found = {}
    for entry in files:
        try:
            one = msgspec.convert(entry, RemoteFile, strict=True)
        except msgspec.ValidationError as error:
            raise _list_error(f"an invalid file: {error}") from None
        if one.path.startswith("/") or ".." in one.path.split("/"):
            raise _list_error(f"{one.path[:200]!r}, which is outside of the run")
        found[one.path] = one  # a path that is listed twice counts once
    return list(found.values())


def _list_error(found: str) -> RemoteError:
    return RemoteError(f"the remote machine lists {found}", code="BK-REMOTE-TRANSFER")


@dataclass(slots=True)
class Mirror:
    """The local copy of a remote run, in `folder`.

    Files in `own` were sent from this machine and are not downloaded. `tell` gets a line for each downloaded
    checkpoint.
    """

    folder: Path
    own: Collection[str]
    tell: Callable[[str], None]
    place: str = "another machine"
    """Location of the run, for messages."""
    _left: int = 0
    _whole: dict[str, tuple[int, int]] = field(default_factory=dict)
    _steps: dict[str, int] = field(default_factory=dict)

    async def update(
        self, files: Sequence[RemoteFile], request: AgentRequest, *, final: bool = False
    ) -> None:
        """Download the newest complete checkpoint, and new content of records and logs.

        If `final`, also download older checkpoints, the newest weights, trained batches, and large files.
        Raises RemoteError if the local disk has too little space for the next files.
        """
        files = self._admitted(files)
        plain = [one for one in files if one.path.split("/")[0] not in _STEPS]
        plain = [one for one in plain if final or not is_fetched_last(one.path)]
        self._check_space(plain)
        for one in plain:
            try:
                await self._fetch(one, request, final=final)
            except FileNotFoundError:
                continue  # the run has deleted the file since it was listed
        for folder in self._wanted_steps(files, final=final):
            parts = [one for one in files if one.path.startswith(f"{folder}/")]
            self._check_space(parts)
            try:
                await self._fetch_step(folder, parts, request)
            except FileNotFoundError:
                continue
        self._prune(files)

    def _admitted(self, files: Sequence[RemoteFile]) -> list[RemoteFile]:
        """Return the files whose names are accepted, and report how many other files exist."""
        files = [one for one in files if not stays_on_machine(one.path)]
        home = [one for one in files if _is_accepted(one)]
        left = len(files) - len(home)
        if left > self._left:
            names = ", ".join(repr(one.path[:80]) for one in files if not _is_accepted(one))
            self.tell(f"files not downloaded because of their names: {left}: {names[:300]}")
            self._left = left
        return home

    def _check_space(self, files: Sequence[RemoteFile]) -> None:
        missing = sum(one.size - _size(self.folder / one.path) for one in files)
        free = free_bytes(self.folder)
        if missing > free - _RESERVE:
            raise RemoteError(
                f"cannot fetch {human_bytes(missing)} of the run: {self.folder} has {human_bytes(free)} free",
                code="BK-DISK-FULL",
                hint="free disk space; the download then continues",
            )

    async def _fetch(self, one: RemoteFile, request: AgentRequest, *, final: bool) -> None:
        target = self.folder / one.path
        if one.path in self.own:
            return
        if one.link is not None:
            write_link(target, one.link)
        elif one.path in CLEANED_RECORDS:
            await self._fetch_record(target, one, request)
        elif one.path.endswith(_GROWING):
            await append_missing(target, one.path, one.size, request)
        elif self._whole.get(one.path) != (one.size, one.changed) and (final or one.size <= _SMALL):
            await _fetch_whole(target, one, request)
            self._whole[one.path] = (one.size, one.changed)

    async def _fetch_record(self, target: Path, one: RemoteFile, request: AgentRequest) -> None:
        if one.size > CHUNK_BYTES or self._whole.get(one.path) == (one.size, one.changed):
            return
        _, content = await request("read", path=one.path, offset=0, length=one.size)
        write_file(target, clean_record(one.path, content, self.place))
        self._whole[one.path] = (one.size, one.changed)

    def _wanted_steps(self, files: Sequence[RemoteFile], *, final: bool) -> list[str]:
        """Return the folders `checkpoints/step_N` to download, newest first.

        These are complete checkpoints that are missing on this machine. Unless `final`, return only the
        newest checkpoint. If `final`, also return the folder of the newest weights.
        """
        committed = {
            one.path.rpartition("/")[0]: one.changed
            for one in files
            if one.path.startswith("checkpoints/step_") and one.path.endswith(f"/{COMMITTED}")
        }
        new = [name for name, changed in committed.items() if self._steps.get(name) != changed]
        wanted = sorted(new, key=_step_of, reverse=True)
        if not final:
            newest = max(committed, key=lambda name: committed[name], default=None)
            return [name for name in wanted if name == newest]
        weights = {"/".join(one.path.split("/")[:2]) for one in files if one.path.startswith("weights/step_")}
        return [*wanted, *sorted(weights, key=_step_of)[-1:]]

    async def _fetch_step(self, name: str, files: Sequence[RemoteFile], request: AgentRequest) -> None:
        """Download a folder under a temporary name, verify its checkpoint, and rename the folder."""
        target = self.folder / name
        commit = next((one for one in files if one.path == f"{name}/{COMMITTED}"), None)
        if commit is not None and await _has_arrived(target, commit, request):
            self._steps[name] = commit.changed
            return
        incoming = target.with_name(f".{target.name}-incoming.tmp-{os.getpid()}")
        shutil.rmtree(incoming, ignore_errors=True)
        try:
            for one in files:
                await _fetch_whole(incoming / one.path.removeprefix(f"{name}/"), one, request)
            if commit is not None:
                try:
                    attempt = int(read_commit(incoming)["attempt"])
                    verify_checkpoint(CheckpointInfo(_step_of(name), attempt, incoming))
                except CheckpointError as error:
                    self.tell(f"{name} arrived damaged, and will be downloaded again: {error}")
                    return
            write_directory(target, lambda folder: _move(incoming, folder), replace=True)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
        if commit is not None:
            self._steps[name] = commit.changed
            self.tell(f"Downloaded {target}")

    def _prune(self, files: Sequence[RemoteFile]) -> None:
        """Delete local checkpoints that the run has deleted. If it has deleted all, keep them."""
        there = {"/".join(one.path.split("/")[:2]) for one in files}
        gone = [name for name in self._steps if name not in there]
        if len(gone) < len(self._steps):
            for name in gone:
                remove_directory(self.folder / name)
                del self._steps[name]


async def append_missing(
    target: Path, path: str, size: int, request: AgentRequest, show: Callable[[bytes], None] = lambda _: None
) -> None:
    """Append new content of a remote file to its local copy.

    If the remote file became shorter, the whole file is downloaded again. `show` gets each new piece.
    """
    here = target.stat().st_size if target.exists() else 0
    if here == size and target.exists():
        return
    if here > size:
        await _fetch_whole(target, RemoteFile(path, size, 0), request)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("ab") as file:
        while here < size:
            _, content = await request("read", path=path, offset=here, length=min(CHUNK_BYTES, size - here))
            if not content:
                return  # the remote file became shorter since it was listed
            file.write(content)
            file.flush()
            show(content)
            here += len(content)


async def _fetch_whole(target: Path, one: RemoteFile, request: AgentRequest) -> None:
    """Download a file under a temporary name, and rename it."""
    part = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    part.unlink(missing_ok=True)
    await append_missing(part, one.path, one.size, request)
    part.replace(target)


async def _has_arrived(target: Path, commit: RemoteFile, request: AgentRequest) -> bool:
    """Return True if the local folder `target` has the remote checkpoint of `commit`."""
    try:
        _, content = await request("read", path=commit.path, offset=0, length=CHUNK_BYTES)
        return (target / COMMITTED).read_bytes() == content
    except FileNotFoundError:
        return False


def _move(source: Path, target: Path) -> None:
    for entry in source.iterdir():
        entry.replace(target / entry.name)


def _is_accepted(one: RemoteFile) -> bool:
    return is_fetched_file(one.path) if one.link is None else is_fetched_link(one.path, one.link)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _step_of(name: str) -> int:
    number = name.rpartition("step_")[2]
    return int(number) if number.isdecimal() else -1
