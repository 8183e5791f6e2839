"""What a host of a run has, for hosts that do not share its disk: read only, over HTTP, for who has the key.

| route | what it answers |
|---|---|
| `GET /index?have=ID` | the steps of each folder; as soon as that is not `ID`, or after a second |
| `GET /trees/FOLDER/NAME` | the files of a step, with sizes and SHA-256 |
| `GET /trees/FOLDER/NAME/FILE?id=ID` | a part of a file (`Range`) |
| `POST /done` | a batch was taken from its place there, so it goes here, too |
| `POST /lines` | what a process has appended to a log or to the metrics |
| `POST /source` | who asks has what is trained, and serves it himself |
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from buckeye.base import storage
from buckeye.base.foreign_files import own_files
from buckeye.base.http_server import http_server, listen
from buckeye.base.json_lines import LineFile
from buckeye.base.request_gate import Gate, Rules
from buckeye.errors import RunError
from buckeye.run_files.directory import METRICS_FILE, RUN_FILE
from buckeye.transport.batches import END, remove_batch

T = TypeVar("T", bound=msgspec.Struct)

OF_NODE_0 = ("batches", "weights", "evals")
OF_THE_TRAINER = ("weights", "trained")
"""The folders of a run whose steps are served, by whom they are; `checkpoints` by both, if need be."""
LINES = (METRICS_FILE, "logs/run.log")
"""The files that grow by lines, of which each host has its own."""
LONGEST_PART = 2**26

_LONGEST_BODY = 2**21
_CHUNK = 2**18
_POLL_SECONDS = 0.02
_HOLD_SECONDS = 1.0
_STALL_SECONDS = 60.0
_START_SECONDS = 30.0


class Done(msgspec.Struct, forbid_unknown_fields=True):
    """A batch, and what it was like."""

    step: int
    id: str


class Lines(msgspec.Struct, forbid_unknown_fields=True):
    """Whole lines for one of `LINES`."""

    file: str
    lines: list[str]


class Here(msgspec.Struct, forbid_unknown_fields=True):
    """The port of a server like this one."""

    port: int


class Files:
    """The steps in some `folders` of a run's directory, and, if it is to be served, the `model` that it began
    with."""

    def __init__(
        self, root: Path, folders: tuple[str, ...] = OF_NODE_0, *, model: Path | None = None
    ) -> None:
        self.root, self._folders, self._model = root, folders, model
        self._id = TreeIds()
        self._hashes: dict[tuple[Path, int, int], str] = {}
        self._lines = {name: _Gathered(root / name) for name in LINES}

    def index(self) -> dict[str, Any]:
        """Folder -> step -> what tells it from others of the same number; and the small files of the run."""
        steps = {
            folder: {
                str(step): found
                for step, path in storage.step_directories(self.root / folder).items()
                if (found := self._id(path)) is not None
            }
            for folder in self._folders
        }
        small = {
            "steps": steps,
            "end": _json_of(self.root / "batches" / END),
            "run": _json_of(self.root / RUN_FILE),
        }
        return {**small, "id": hashlib.sha256(json.dumps(small, sort_keys=True).encode()).hexdigest()}

    def place(self, folder: str, name: str) -> Path | None:
        """Where a step is; the name of the configuration files and of the model is `now`."""
        if name == "now":
            return {"configs": self.root / "configs", "model": self._model}.get(folder)
        known = folder in self._folders and name.isdigit() and name.isascii() and len(name) < 12
        return storage.step_directory(self.root / folder, int(name)) if known else None

    def listing(self, directory: Path) -> dict[str, Any]:
        """The files of a step. Raises OSError if it goes away meanwhile."""
        seen = [(name, path, path.stat()) for name, path in _files(directory)]
        digests = _published(directory)
        files = [
            {
                "name": name,
                "size": stat.st_size,
                "mtime": stat.st_mtime_ns // 1000,
                "sha256": digests.get(name) or self._hash(path, stat.st_size, stat.st_mtime_ns),
            }
            for name, path, stat in seen
        ]
        return {
            "id": _id_of([(name, stat.st_size, stat.st_mtime_ns // 1000) for name, _, stat in seen]),
            "files": files,
        }

    def done(self, step: int, found: str) -> None:
        """Delete a batch, if it is still the one that is meant."""
        if self._id(storage.step_directory(self.root / "batches", step)) == found:
            remove_batch(self.root / "batches", step)

    def append(self, file: str, lines: list[str]) -> None:
        """Append lines that are not there yet. Raises KeyError for another file than those of `LINES`."""
        self._lines[file].append(lines)

    def _hash(self, path: Path, size: int, changed: int) -> str:
        key = (path, size, changed)
        if key not in self._hashes:
            self._hashes[key] = storage.sha256_file(path)
        return self._hashes[key]


class _Gathered:
    """A file of lines that several hosts send. What is sent twice is there once: every line has a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: set[bytes] | None = None
        self._lock = threading.Lock()

    def append(self, lines: list[str]) -> None:
        with self._lock:
            if self._known is None:
                there = self._path.read_bytes().split(b"\n") if self._path.exists() else []
                self._known = {_short(line) for line in there}
            known = self._known
            new = [
                line for line in dict.fromkeys(line.encode() for line in lines) if _short(line) not in known
            ]
            if new:
                file = LineFile(self._path)
                try:
                    file.append(b"".join(line + b"\n" for line in new))
                finally:
                    file.close()
            known.update(map(_short, new))


def _short(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=12).digest()


def tree_id(directory: Path) -> str:
    """What tells the content of a directory from another one: names, sizes and times of its files. Raises
    OSError if it is gone, ValueError for what is no plain file."""
    stats = [(name, path.stat()) for name, path in _files(directory)]
    return _id_of([(name, stat.st_size, stat.st_mtime_ns // 1000) for name, stat in stats])


class TreeIds:
    """`tree_id` of directories, computed again when one has changed; None for one that is gone. Files of a
    step are put there by a rename, which the directory shows."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], str]] = {}

    def __call__(self, directory: Path) -> str | None:
        try:
            seen = directory.stat()
            state = (seen.st_ino, seen.st_mtime_ns)
            known = self._known.get(directory)
            if known is None or known[0] != state:
                known = self._known[directory] = (state, tree_id(directory))
        except (OSError, ValueError):
            self._known.pop(directory, None)
            return None
        return known[1]


def _id_of(files: list[tuple[str, int, int]]) -> str:
    return hashlib.sha256(json.dumps(sorted(files)).encode()).hexdigest()


def _files(directory: Path) -> list[tuple[str, Path]]:
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is gone")
    return [(path.relative_to(directory).as_posix(), path) for path in own_files(directory)]


def _published(directory: Path) -> dict[str, str]:
    """The SHA-256 that the manifest of a step knows."""
    manifest = _json_of(directory / "manifest.json") or _json_of(directory / "COMMITTED")
    if not isinstance(manifest, dict):
        return {}
    files = manifest.get("files", {"batch.safetensors": manifest.get("sha256")})
    return {str(name): digest for name, digest in files.items() if isinstance(digest, str)}


def _json_of(path: Path) -> Any:
    try:
        return storage.read_json(path)
    except (OSError, ValueError):
        return None


class FileServer:
    """Serves `files` at an `address` of this host, on a port of its own, until it is closed. `found(host,
    port)` is told of a server that has what is trained."""

    def __init__(
        self, files: Files, *, address: str, key: str, found: Callable[[str, int], None] | None = None
    ) -> None:
        self._files, self._found = files, found
        listener = listen(address, 0, change="Is cluster.address an address of this host?")
        self.port: int = listener.getsockname()[1]
        app = Gate(self._app(), Rules(host=address, key=key))  # type: ignore[arg-type]
        self._server: uvicorn.Server = http_server(app, timeout_graceful_shutdown=1)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[listener])), name="files", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RunError(f"The server of the run's files did not start at {address}:{self.port}.")
            time.sleep(0.01)

    def close(self) -> None:
        """Serve no longer."""
        self._server.should_exit = True
        self._thread.join(_START_SECONDS)

    def _app(self) -> Starlette:
        routes = [
            Route("/index", self._index, methods=["GET"]),
            Route("/trees/{folder}/{name}", self._listing, methods=["GET"]),
            Route("/trees/{folder}/{name}/{file:path}", self._part, methods=["GET"]),
            Route("/done", self._done, methods=["POST"]),
            Route("/lines", self._lines, methods=["POST"]),
            Route("/source", self._source, methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _refuse, OSError: _failed})

    async def _index(self, request: Request) -> Response:
        have, until = request.query_params.get("have"), time.monotonic() + _HOLD_SECONDS
        while (index := self._files.index())["id"] == have and time.monotonic() < until:
            await asyncio.sleep(_POLL_SECONDS)
        return JSONResponse(index)

    def _place(self, request: Request) -> Path:
        place = self._files.place(request.path_params["folder"], request.path_params["name"])
        if place is None or not place.is_dir():
            raise HTTPException(404, "There is no such step, or not any more.")
        return place

    async def _listing(self, request: Request) -> Response:
        place = self._place(request)
        try:
            return JSONResponse(await to_thread.run_sync(self._files.listing, place))
        except FileNotFoundError:
            raise HTTPException(404, "It went away meanwhile.") from None

    async def _part(self, request: Request) -> Response:
        place, name = self._place(request), request.path_params["file"]
        path = dict(_files(place)).get(name)
        if path is None:
            raise HTTPException(404, f"{name} is none of its files.")
        start, length = _range(request.headers.get("range", ""))
        file = path.open("rb")
        if tree_id(place) != request.query_params.get("id"):  # of the one that the file was opened in
            file.close()
            raise HTTPException(409, "There is another one in its place now.")
        file.seek(start)

        async def content() -> AsyncIterator[bytes]:
            left = length
            with file:
                while left:
                    data = file.read(min(_CHUNK, left))
                    if not data:
                        return  # who asked sees that it is too short
                    left -= len(data)
                    yield data

        answer = StreamingResponse(
            content(), 206, {"content-length": str(length)}, media_type="application/octet-stream"
        )
        return _Patient(answer)

    async def _done(self, request: Request) -> Response:
        said = await _body(request, Done)
        await to_thread.run_sync(self._files.done, said.step, said.id)
        return JSONResponse({})

    async def _lines(self, request: Request) -> Response:
        said = await _body(request, Lines)
        if said.file not in LINES or any("\n" in line for line in said.lines):
            raise HTTPException(400, f"{said.file!r} is none of {', '.join(LINES)}, or a line is none.")
        await to_thread.run_sync(self._files.append, said.file, said.lines)
        return JSONResponse({})

    async def _source(self, request: Request) -> Response:
        said = await _body(request, Here)
        if self._found is None or request.client is None:
            raise HTTPException(404, "Nothing is fetched from elsewhere here.")
        await to_thread.run_sync(self._found, request.client.host, said.port)
        return JSONResponse({})


class _Patient(Response):
    """An answer that whoever asked must take piece by piece, each within a minute."""

    def __init__(self, answer: Response) -> None:
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def within(message: Any) -> None:
            async with asyncio.timeout(_STALL_SECONDS):
                await send(message)

        with suppress(TimeoutError, ClientDisconnect):
            await self._answer(scope, receive, within)


def _range(text: str) -> tuple[int, int]:
    """The first byte and the number of bytes that `bytes=0-99` asks for."""
    first, _, last = text.removeprefix("bytes=").partition("-")
    if not (text.startswith("bytes=") and first.isdigit() and last.isdigit()):
        raise HTTPException(416, "Ask for a part: Range: bytes=0-99.")
    start, length = int(first), int(last) - int(first) + 1
    if not 0 < length <= LONGEST_PART:
        raise HTTPException(416, f"A part has 1 to {LONGEST_PART} bytes.")
    return start, length


async def _body(request: Request, kind: type[T]) -> T:
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > _LONGEST_BODY:
            raise HTTPException(413, f"The body is larger than {_LONGEST_BODY} bytes.")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise HTTPException(400, str(error)) from None


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _said(error.status_code, error.detail)


async def _failed(request: Request, error: Exception) -> Response:
    return _said(500, f"{error.strerror or error}" if isinstance(error, OSError) else str(error))


def _said(status: int, message: str) -> Response:
    content: Mapping[str, Any] = {"error": {"message": message}}
    return JSONResponse(content, status)
