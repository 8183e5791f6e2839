"""Upload the files of a project that are missing or different on another machine, as one tar archive."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.errors import RemoteError
from buckeye.remote.connection import LostConnectionError, SshConnection
from buckeye.remote.job import read_answer
from buckeye.remote.manifest import Manifest

_PIECE = 256 * 1024
_SECONDS = 3600.0
_ANSWER_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class UploadCounts:
    """Counts of an upload: sent files and bytes, and unchanged and deleted files of the remote folder."""

    files: int
    bytes: int
    unchanged: int
    removed: int


async def send_project(link: SshConnection, python: str, folder: str, manifest: Manifest) -> UploadCounts:
    """Upload the files of the manifest to the remote `folder`, and delete files of an earlier manifest.

    `python` is a remote interpreter with this version of Buckeye. Raises LostConnectionError, and RemoteError
    for failures on the other machine.
    """
    digests = await asyncio.to_thread(manifest.digests)
    async with link.program([python, "-P", "-m", "buckeye.remote.pod.receive", folder]) as process:
        parts = {"files": digests, "links": manifest.links, "folders": manifest.folders}
        announced = json.dumps(parts).encode() + b"\n"
        process.stdin.write(announced)
        needed: list[str] = (await _answer(process, link, folder))["needed"]
        count = 0
        unknown = [name for name in needed if name not in manifest.files]
        if unknown:
            raise RemoteError(
                f"{link.target} requested {unknown[0]}, which was not offered", code="BK-REMOTE-TRANSFER"
            )
        async with asyncio.timeout(_SECONDS):
            for piece in iter_tar({name: manifest.files[name] for name in needed}):
                process.stdin.write(piece)
                await process.stdin.drain()
                count += len(piece)
        process.stdin.write_eof()
        done = await _answer(process, link, folder)
    return UploadCounts(
        files=int(done["received"]),
        bytes=count,
        unchanged=len(digests) - len(needed),
        removed=int(done["removed"]),
    )


def iter_tar(files: Mapping[str, Path]) -> Iterator[bytes]:
    """Yield the pieces of a tar archive of local files. The keys of `files` are the names in the archive.

    Raises RemoteError if a file becomes shorter while it is read.
    """
    for name, path in files.items():
        status = path.stat()
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = status.st_size, int(status.st_mtime), status.st_mode & 0o777
        yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        yield from _content(path, info.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def make_tar(files: Mapping[str, bytes]) -> bytes:
    """Return a tar archive of files, given as content by name. Equal files give equal bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o644
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _content(path: Path, size: int) -> Iterator[bytes]:
    left = size
    with path.open("rb") as file:
        while left:
            piece = file.read(min(_PIECE, left))
            if not piece:
                raise RemoteError(
                    f"{path} became shorter while it was sent", code="BK-REMOTE-TRANSFER", hint="try again"
                )
            left -= len(piece)
            yield piece
    yield bytes(-size % tarfile.BLOCKSIZE)


async def _answer(process: Any, link: SshConnection, folder: str) -> dict[str, Any]:
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            said, _ = await read_answer(process.stdout)
            return said
    except TimeoutError:
        raise RemoteError(
            f"{link.target} did not confirm that it received {folder}", code="BK-REMOTE-TRANSFER"
        ) from None
    except asyncio.IncompleteReadError:
        said = (await process.stderr.read()).decode(errors="replace").strip()
    if said:
        raise RemoteError(f"{link.target} could not receive the project: {said}", code="BK-REMOTE-TRANSFER")
    raise LostConnectionError(f"the connection to {link.target} was lost")
