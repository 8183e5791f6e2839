"""Has here what another host has: steps are fetched in parts, checked, and put in their place at once.

A step that is only half here when the connection, or this process, ends is gone on with. Nothing is believed
before its SHA-256 is right.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import msgspec

from buckeye.base import storage
from buckeye.base.disk import write_when_room
from buckeye.base.foreign_files import plain_name
from buckeye.errors import BuckeyeError, TransportError
from buckeye.transport.batches import END
from buckeye.transport.weights import prune_weights
from buckeye_machines.engines.files_server import LINES, LONGEST_PART, TreeIds

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 60.0
_HASHED_SECONDS = 1800.0  # for a model of a terabyte
_LONGEST_ANSWER = 2**25
_BUFFER = 2**20
_MOST_LINES_BYTES = 2**19
_PAUSE_SECONDS, _LONGEST_PAUSE = 0.1, 2.0
_TELL_SECONDS = 30.0
_ONE: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
"""Of a folder one step at a time comes to this host by this process."""
_INCOMING = re.compile(r"\.incoming-(.+)-[0-9a-f]{16}")


class LostError(TransportError):
    """The other host does not answer, or has stopped in the middle of an answer."""


class GoneError(TransportError):
    """What was asked for is not there, or not any more."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    size: int
    mtime: int
    sha256: str


class _Listing(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    files: list[_File]


class Index(msgspec.Struct, forbid_unknown_fields=True):
    """See `Files.index`."""

    id: str
    steps: dict[str, dict[int, str]]
    end: Any
    run: Any


class Source:
    """Another host's `FileServer`. Every method raises LostError, GoneError, or TransportError with what was
    refused. For one thread."""

    def __init__(self, host: str, port: int, key: str, *, timeout: float = _TIMEOUT_SECONDS) -> None:
        self.name = f"{host}:{port}"
        self._place, self._timeout = (host, port), timeout
        self._headers = {"Authorization": f"Bearer {key}"}
        self._connection: http.client.HTTPConnection | None = None

    def index(self, have: str | None = None) -> Index:
        """What is there; waits for a second as long as it is still what one has."""
        return self._parsed(self._ask("GET", f"/index?have={have or ''}"), Index)

    def listing(self, folder: str, name: str) -> _Listing:
        """The files of a step."""
        listing = self._parsed(self._ask("GET", f"/trees/{folder}/{name}", seconds=_HASHED_SECONDS), _Listing)
        for file in listing.files:
            try:
                for part in file.name.split("/"):
                    plain_name(part)
            except ValueError as error:
                raise TransportError(f"{self.name} names a file that is none: {error}.") from None
            if file.size < 0:
                raise TransportError(f"{self.name}: {file.name} has {file.size} bytes.")
        return listing

    def part(self, path: str, start: int, length: int, into: BinaryIO, digest: Any) -> None:
        """Append a part of a file; what has come is there also if the rest does not."""
        answer = self._open(
            "GET", path, None, {"Range": f"bytes={start}-{start + length - 1}"}, self._timeout
        )
        try:
            if answer.status != 206 or answer.length != length:
                raise LostError(f"{self.name} does not give the part of {path} that was asked for.")
            buffer = memoryview(bytearray(min(_BUFFER, length)))
            while length:
                count = answer.readinto(buffer[: min(len(buffer), length)])
                if not count:
                    raise LostError(f"{self.name} stopped {length} bytes before the end of a part.")
                into.write(buffer[:count])
                digest.update(buffer[:count])
                length -= count
            answer.read()
        except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
            self._forget()
            raise LostError(f"{self.name} was lost in the middle of {path}: {error!r}") from None
        except BaseException:
            self._forget()
            raise

    def close(self) -> None:
        """End what is being asked, from another thread."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        """Tell it something."""
        self._ask("POST", path, json.dumps(body).encode())

    def _ask(
        self, method: str, path: str, body: bytes | None = None, *, seconds: float | None = None
    ) -> bytes:
        answer = self._open(method, path, body, {}, seconds or self._timeout)
        return self._read(answer, path)

    def _open(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], seconds: float
    ) -> http.client.HTTPResponse:
        kind = {"Content-Type": "application/json"} if body is not None else {}
        try:
            connection = self._connection
            if connection is None:
                connection = self._connection = http.client.HTTPConnection(*self._place, timeout=seconds)
            if connection.sock is not None:
                connection.sock.settimeout(seconds)
            connection.timeout = seconds
            connection.request(method, path, body, {**self._headers, **kind, **headers})
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._forget()
            raise LostError(f"{self.name} does not answer: {error!r}") from None
        if answer.status >= 400:
            said = self._read(answer, path).decode(errors="replace")[:500]
            kinds = {404: GoneError, 409: GoneError, 500: LostError, 503: LostError}
            raise kinds.get(answer.status, TransportError)(
                f"{self.name} refused {path} ({answer.status}): {said}"
            )
        return answer

    def _read(self, answer: http.client.HTTPResponse, path: str) -> bytes:
        try:
            data = answer.read(_LONGEST_ANSWER + 1)
            if len(data) > _LONGEST_ANSWER:
                raise TransportError(f"{self.name} answers {path} with more than {_LONGEST_ANSWER} bytes.")
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._forget()
            raise LostError(f"{self.name} was lost in the middle of {path}: {error!r}") from None
        except TransportError:
            self._forget()
            raise
        return data

    def _parsed(self, data: bytes, kind: Any) -> Any:
        try:
            return msgspec.json.decode(data, type=kind, strict=False)
        except msgspec.MsgspecError as error:
            raise TransportError(f"{self.name} answered with something unexpected: {error}") from None

    def _forget(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def fetch(source: Source, folder: str, name: str, final: Path, *, private: bool = False) -> str:
    """Make `final` what the source has there, and return what tells it from others. What is `private` nobody
    else may read. Waits for room on the disk. Raises as `Source` does; what has come is kept for the next
    time."""
    with _ONE[final.parent]:
        return _fetch(source, folder, name, final, 0o700 if private else 0o777)


def _fetch(source: Source, folder: str, name: str, final: Path, mode: int) -> str:
    listing = source.listing(folder, name)
    incoming = final.with_name(f".incoming-{final.name}-{listing.id[:16]}")
    for left in _incoming(final.parent):
        if left != incoming and left.name.startswith(f".incoming-{final.name}-"):
            shutil.rmtree(left, ignore_errors=True)

    def fill(directory: Path) -> None:
        directory.chmod(directory.stat().st_mode & mode)
        for path in list(incoming.iterdir()):
            path.rename(directory / path.name)

    def write() -> None:
        incoming.mkdir(mode=mode, parents=True, exist_ok=True)
        for file in listing.files:
            place = incoming / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            _fetch_file(source, f"/trees/{folder}/{name}", listing.id, file, place)
        storage.write_directory(final, fill, replace=True)
        incoming.rmdir()

    here = sum(path.stat().st_size for path in incoming.rglob("*") if path.is_file())
    missing = sum(file.size for file in listing.files) - here
    final.parent.mkdir(parents=True, exist_ok=True)
    write_when_room(final, write, what=f"{folder} {name} of {source.name}", needed=max(0, missing))
    return listing.id


def _incoming(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _INCOMING.fullmatch(path.name)] if folder.is_dir() else []


def _fetch_file(source: Source, tree: str, tree_id: str, file: _File, place: Path) -> None:
    wrong: str | None = None
    for _ in range(3):
        found = _fetch_parts(source, f"{tree}/{quote(file.name)}?id={tree_id}", file, place)
        if found == file.sha256:
            break
        if found == wrong:  # it is so there, too; who reads it will say what that means
            log.warning("%s of %s is not what its manifest says, there or here", file.name, source.name)
            break
        wrong = found
        place.unlink()
    else:
        raise TransportError(f"{file.name} of {source.name} came three times, and each time otherwise.")
    os.utime(place, ns=(file.mtime * 1000, file.mtime * 1000))


def _fetch_parts(source: Source, path: str, file: _File, place: Path) -> str:
    """Go on with a file where it ends here; the SHA-256 of the whole."""
    digest = hashlib.sha256()
    with place.open("ab+") as into:
        if into.tell() > file.size:
            into.truncate(0)
        into.seek(0)
        while chunk := into.read(_BUFFER):
            digest.update(chunk)
        while (start := into.seek(0, os.SEEK_END)) < file.size:
            try:
                source.part(path, start, min(LONGEST_PART, file.size - start), into, digest)
            finally:
                into.flush()
    return digest.hexdigest()


class Follower:
    """Keeps some `folders` of the run in `root` as the `source` has them, on a thread of its own.

    A step that goes there goes here, too. A batch that goes here was trained on, or set aside because it was
    damaged: it goes there, as soon as what it was trained to is there.
    """

    def __init__(self, source: Source, root: Path, folders: tuple[str, ...]) -> None:
        self.source = source
        self._root, self._folders = root, folders
        self._taken: dict[int, str] = {}
        self._seen: dict[str, set[int]] = {folder: set() for folder in folders}
        self._id = TreeIds()
        self._stop = threading.Event()
        self._behind = False
        self.index: Index | None = None
        """What the source had when it was asked last."""
        self._thread = threading.Thread(target=self._run, name=f"follows {source.name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Follow no longer; what is being fetched is left as it is."""
        self._stop.set()
        self.source.close()

    def look(self) -> bool:
        """Bring one step of each folder here. False if none was missing."""
        index = self.source.index(None if self.index is None or self._behind else self.index.id)
        self.index, self._behind = index, False
        for folder in self._folders:
            self._behind |= self._look_at(folder, index)
        if "batches" in self._folders:
            self._copy_end(index.end)
        return self._behind

    def mine(self, folder: str) -> dict[int, str]:
        """Step -> what tells it from others, of the steps that are here."""
        found = {step: self._id(path) for step, path in storage.step_directories(self._root / folder).items()}
        return {step: known for step, known in found.items() if known is not None}

    def _look_at(self, folder: str, index: Index) -> bool:
        mine, theirs = self.mine(folder), index.steps.get(folder, {})
        if folder == "batches" and self._tell_taken(mine, theirs, index.steps.get("weights", {})):
            return True  # the index is older than that
        if folder == "weights" and theirs and isinstance(index.run, dict):
            prune_weights(self._root / folder, str(index.run.get("run_id")), keep=theirs.__contains__)
        gone = set(mine) if folder == "batches" else self._seen[folder] & set(mine)
        for path in (storage.step_directory(self._root / folder, step) for step in gone - set(theirs)):
            if not storage.is_locked(path):  # else somebody has still to read it
                storage.remove_directory(path)
        self._seen[folder] |= set(theirs)
        self._drop_incoming(folder, theirs)
        missing = [step for step, known in theirs.items() if mine.get(step) != known]
        wanted = [step for step in missing if folder != "batches" or step not in self._taken]
        if not wanted:
            return False
        step = min(wanted) if folder == "batches" else max(wanted)
        began = time.monotonic()
        found = fetch(self.source, folder, str(step), storage.step_directory(self._root / folder, step))
        if folder == "batches":
            self._taken[step] = found
        log.debug("%s %d of %s in %.2f s", folder, step, self.source.name, time.monotonic() - began)
        return True

    def _tell_taken(
        self, mine: Mapping[int, str], theirs: Mapping[int, str], weights: Mapping[int, str]
    ) -> bool:
        """Have the batches go there that have gone here; whether there were any."""
        trained, told = self.mine("weights"), False
        for step, known in list(self._taken.items()):
            newer = {version: found for version, found in trained.items() if version > step}
            if theirs.get(step) != known:
                del self._taken[step]
            elif step not in mine and (not newer or any(weights.get(v) == w for v, w in newer.items())):
                self.source.post("/done", {"step": step, "id": known})
                del self._taken[step]
                told = True
        return told

    def _drop_incoming(self, folder: str, theirs: Mapping[int, str]) -> None:
        for path in _incoming(self._root / folder):
            step = path.name.split("-")[1].removeprefix("step_")
            if not step.isdigit() or int(step) not in theirs:
                shutil.rmtree(path, ignore_errors=True)

    def _copy_end(self, end: Any) -> None:
        path = self._root / "batches" / END
        if end is None:
            path.unlink(missing_ok=True)
        elif not path.exists() or storage.read_json(path) != end:
            storage.write_file(path, json.dumps(end) + "\n")

    def _run(self) -> None:
        pause, lost, told = _PAUSE_SECONDS, None, 0.0
        while not self._stop.is_set():
            try:
                self.look()
                if lost is not None:
                    log.info("%s answers again, after %.0f s", self.source.name, time.monotonic() - lost)
                pause, lost = _PAUSE_SECONDS, None
                continue
            except GoneError:
                self.index = None
            except (BuckeyeError, OSError) as error:
                if self._stop.is_set():  # which is why it failed
                    return
                now = time.monotonic()
                lost = now if lost is None else lost
                if now - max(told, lost) > _TELL_SECONDS or not isinstance(error, LostError):
                    told = now
                    log.warning("%s: asked again and again. %s", self.source.name, error)
                self.index = None
            except Exception:
                log.exception("Following %s failed, and is tried again", self.source.name)
            self._stop.wait(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)


class LineSender:
    """Sends what this host appends to its logs and metrics, from their beginning on; what is there is not
    appended again."""

    def __init__(self, source: Source, root: Path) -> None:
        self._source, self._root = source, root
        self._positions = dict.fromkeys(LINES, 0)

    def send(self) -> None:
        """Send the lines that are new. Raises as `Source` does."""
        for name in LINES:
            path = self._root / name
            while path.exists():
                with path.open("rb") as file:
                    file.seek(self._positions[name])
                    data = file.read(_MOST_LINES_BYTES)
                whole = data[: data.rfind(b"\n") + 1]
                if not whole:
                    if len(data) == _MOST_LINES_BYTES:  # a line that is longer is none of ours
                        self._positions[name] += len(data)
                        continue
                    break
                lines = whole.decode(errors="replace").split("\n")
                self._source.post("/lines", {"file": name, "lines": [line for line in lines if line]})
                self._positions[name] += len(whole)
