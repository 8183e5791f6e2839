"""Checkpoints in an object store: only complete ones count, and only Buckeye's own objects are deleted.

`<url>/step_<N>-attempt_<A>-<id>/` has the files of a checkpoint under their names, and `COMMITTED`. This file
is written last and has the length and SHA-256 of each. An object exists completely or not at all, so a folder
without `COMMITTED` is not a checkpoint. A store URL belongs to one run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from buckeye.base import storage
from buckeye.base.disk import free_bytes, human_bytes, reserve_bytes
from buckeye.base.distribution import need
from buckeye.base.faults import fault_point
from buckeye.errors import BuckeyeError, CheckpointError, DiskFullError, StoreError
from buckeye.transport.checkpoint import COMMITTED, CheckpointInfo

log = logging.getLogger(__name__)

STORE_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
"""Module that accesses each kind of store; the extra has the store's name."""

DOWNLOAD = ".download"
"""Suffix of the folder of an incomplete download, in `checkpoints/`."""

_NAME = re.compile(r"step_(0|[1-9]\d{0,11})-attempt_([1-9]\d{0,8})-[0-9a-f]{6,32}")
_ID = re.compile(r"[\w-]{1,64}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PARTS = ("trainer", "orchestrator")
_FILES_AT_ONCE = 4
_PARTS_AT_ONCE = 4  # of one uploaded file
_MOST_MANIFEST = 64 * 2**20
_MOST_RUN = 2**20
_PAUSES = (1.0, 30.0)  # after the first failure, and at most
_REQUEST_SECONDS = 60


class _Attempt(msgspec.Struct, kw_only=True, frozen=True):
    attempt: int
    started: float
    resumed_step: int | None


class _Run(msgspec.Struct, kw_only=True, frozen=True):
    """Content of `run.json`: required to resume a run after its directory is lost."""

    run_id: str
    attempt: int
    attempts: list[_Attempt]


class StoreManifest(msgspec.Struct, kw_only=True, frozen=True):
    """Content of `COMMITTED` in a store: that of the run's directory, the size of every file, the run, and
    the protected steps (`kept`), such as the best one.
    """

    run_id: str
    attempt: int
    step: int
    time: float
    files: dict[str, str]
    sizes: dict[str, int]
    run: _Run
    kept: list[int] = []


class CheckpointStore:
    """Store for the checkpoints of a run: `s3://bucket/prefix` or `gs://bucket/prefix`.

    Its credentials are those that the tools of AWS or Google find. Raise `UsageError` if the required module
    is not installed. All methods raise `StoreError` if the store is unreachable or refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        kind = url.partition("://")[0]
        if kind in STORE_PACKAGES:
            need(STORE_PACKAGES[kind], f"ckpt.store = {url}")
        import fsspec

        settings: dict[str, Any] = {"use_listings_cache": False}
        settings |= {"requests_timeout": _REQUEST_SECONDS} if kind == "gs" else {}
        settings |= {"max_concurrency": _PARTS_AT_ONCE} if kind == "s3" else {}
        with self._telling("be opened"):
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **settings)

    def probe(self) -> None:
        """Write a test object and delete it again."""
        name = f"{self._root}/.buckeye-probe-{secrets.token_hex(8)}"
        with self._telling("be written to"):
            self._fs.pipe_file(name, b"written to see whether checkpoints can be")
        with self._telling("have objects deleted"):
            self._fs.rm_file(name)

    def list_checkpoints(self) -> list[CheckpointInfo]:
        """Return the committed checkpoints, the newest last; their paths are relative to the store."""
        return _committed(self._objects())

    def manifest(self, info: CheckpointInfo) -> StoreManifest:
        """Return a checkpoint's manifest. Raise `CheckpointError` if it does not match the objects, or is
        unsafe.
        """
        objects = self._objects(info.path.name)
        if not 0 < objects.get(COMMITTED, 0) <= _MOST_MANIFEST:
            raise CheckpointError(f"{self.url}/{info.path}/{COMMITTED} is missing, empty or too large.")
        with self._telling("be read"):
            text = self._fs.cat_file(f"{self._root}/{info.path}/{COMMITTED}")
        try:
            found = msgspec.json.decode(text, type=StoreManifest)
            _check(found, info, objects)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.url}/{info.path}/{COMMITTED} cannot be trusted: {error}.") from None
        return found

    def upload(
        self,
        directory: Path,
        commit: Mapping[str, Any],
        name: str,
        run: Path,
        *,
        kept: Collection[int] = (),
    ) -> int:
        """Commit the checkpoint in a directory to the store as `name`, and return the bytes sent.

        `commit` is its COMMITTED, `run` the run's directory, `kept` the steps to retain at any age. Existing
        files are not sent again, since the name identifies their content. Raise `FileNotFoundError` if the
        directory is deleted meanwhile.
        """
        here = {file: directory / file for file in commit["files"]}
        sizes = {file: path.stat().st_size for file, path in here.items()}
        there = self._objects(name)
        sent = self._send({f: here[f] for f in here if there.get(f) != sizes[f]}, name)
        there = self._objects(name)
        wrong = [f for f in commit["files"] if there.get(f) != sizes[f]]
        if wrong:
            raise StoreError(f"{self.url}/{name} lacks {wrong[0]} ({len(wrong)} files), or part of it.")
        about = {"run": storage.read_json(run / "run.json"), "kept": sorted(kept)}
        manifest = {**commit, "sizes": {file: there[file] for file in commit["files"]}, **about}
        fault_point("store.before_commit")
        with self._telling("be written to"):
            self._fs.pipe_file(f"{self._root}/{name}/{COMMITTED}", json.dumps(manifest).encode())
        fault_point("store.committed")
        return sent

    def _send(self, files: Mapping[str, Path], name: str) -> int:
        """Upload files of the checkpoint `name`, several at a time. Return their total bytes."""

        def put(file: str) -> None:
            with self._telling("be written to", local=files[file]):
                self._fs.put_file(str(files[file]), f"{self._root}/{name}/{file}")
            fault_point("store.upload")

        _at_once(put, list(files))
        return sum(path.stat().st_size for path in files.values())

    def prune(self, keep: int | None, *, protected: Collection[int]) -> list[int]:
        """Delete all committed checkpoints except the `keep` newest (None: all) and those of `protected`
        steps. Also delete leftovers of killed writers that are older than the newest. Only files of
        checkpoints are deleted. Return the steps of the deleted committed checkpoints.
        """
        objects = self._objects()
        committed = _committed(objects)
        if not committed:
            return []
        whole = {info.path.name for info in committed}
        begun = (_named(name.partition("/")[0]) for name in objects)
        left = {
            info.path.name
            for info in begun
            if info is not None and recency_key(info) < recency_key(committed[-1])
        }
        old = [info for info in committed[: -keep if keep else 0] if info.step not in protected]
        for name in [*(info.path.name for info in old), *sorted(left - whole)]:
            ours = [each for each in objects if each.startswith(f"{name}/") and _is_ours(each)]
            self._delete(sorted(ours, key=lambda each: not each.endswith(COMMITTED)))
        self._abort_uploads(committed[-1])
        return [info.step for info in old]

    def download(self, info: CheckpointInfo, root: Path) -> None:
        """Download a checkpoint to `root`, verified, in one atomic step. Files from an earlier attempt, or in
        the directory of that step, are not downloaded again. Raise `CheckpointError` for a damaged one,
        `DiskFullError` without enough space.
        """
        manifest = self.manifest(info)
        final, incoming = storage.step_directory(root, info.step), root / f".{info.path.name}{DOWNLOAD}"
        incoming.mkdir(parents=True, exist_ok=True)
        _make_room(manifest, incoming, f"{self.url}/{info.path}")
        here, began = _same_here(final, manifest), time.monotonic()
        size = human_bytes(sum(manifest.sizes.values()))
        log.info("Downloading the checkpoint of step %d: %s", info.step, size)

        def get(file: str) -> None:
            target = incoming / file
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                if file in here and not target.exists():
                    storage.link_or_copy(str(final / file), str(target))
                self._get(f"{self._root}/{info.path}/{file}", target, manifest.files[file])
            except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
                raise CheckpointError(
                    f"{self.url}/{info.path} has two files in one place: {error}."
                ) from None
            fault_point("store.download")

        _at_once(get, list(manifest.files))
        (incoming / COMMITTED).write_bytes(msgspec.json.encode(manifest))
        storage.write_directory(final, lambda made: _move(incoming, made), replace=True)
        for rest in root.glob(f".*{DOWNLOAD}"):
            shutil.rmtree(rest, ignore_errors=True)
        log.info("Downloaded the checkpoint of step %d in %.1f s", info.step, time.monotonic() - began)

    @staticmethod
    def retry(work: Callable[[], object], *, seconds: float) -> None:
        """Retry `work` until the store does not fail. Raise `StoreError` after `seconds`, or if the store
        refuses.
        """
        began, (pause, most) = time.monotonic(), _PAUSES
        tried = 0
        while True:
            try:
                work()
                return
            except StoreError as error:
                tried += 1
                if error.denied or time.monotonic() + pause > began + seconds:
                    raise
                log.warning("%s This was try %d; the next is in %.0f s", error, tried, pause)
            time.sleep(pause)
            pause = min(most, 2 * pause)

    def _get(self, source: str, target: Path, digest: str) -> None:
        """Download a file, unless an earlier attempt completed it, and check its SHA-256."""
        if target.is_file() and storage.sha256_file(target) == digest:
            return
        target.unlink(missing_ok=True)
        with self._telling("be read"):
            self._fs.get_file(source, str(target))
        if storage.sha256_file(target) != digest:
            target.unlink()
            name = self.url + source.removeprefix(self._root)
            raise CheckpointError(f"{name} is not the file that was committed (SHA-256 differs).")

    def _objects(self, below: str = "") -> dict[str, int]:
        """Return the sizes of all objects below a name, by the rest of their names."""
        path = f"{self._root}/{below}" if below else self._root
        with self._telling("be listed"):
            self._fs.invalidate_cache()
            found = self._fs.find(path, detail=True)
        return {name[len(path) + 1 :]: int(about["size"]) for name, about in found.items() if name != path}

    def _delete(self, names: Sequence[str]) -> None:
        with self._telling("have objects deleted"):
            for name in names:
                self._fs.rm_file(f"{self._root}/{name}")
                fault_point("store.deleted")

    def _abort_uploads(self, newest: CheckpointInfo) -> None:
        """Abort interrupted multipart uploads. S3 does not list them as objects, but stores and bills
        them.
        """
        if not hasattr(self._fs, "call_s3"):  # other stores drop them automatically
            return
        bucket, prefix, _ = self._fs.split_path(f"{self._root}/step_")
        with self._telling("be tidied"):
            listed = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
            for each in listed.get("Uploads", []):
                about = _named(each["Key"].removeprefix(prefix[: -len("step_")]).partition("/")[0])
                if about is not None and recency_key(about) <= recency_key(newest):
                    self._fs.abort_mpu(bucket, each["Key"], each["UploadId"])

    @contextmanager
    def _telling(self, what: str, *, local: Path | None = None) -> Iterator[None]:
        """Convert the libraries' errors to `StoreError`, except a missing `local` file."""
        try:
            yield
        except BuckeyeError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and local is not None and not local.exists():
                raise
            why, denied = _reason(error)
            raise StoreError(f"{self.url} cannot {what}: {why}", denied=denied) from None


def name_in_store(info: CheckpointInfo, commit: Mapping[str, Any]) -> str:
    """Return the name of a run directory's checkpoint in the store. It depends only on the content."""
    digest = hashlib.sha256(json.dumps(commit["files"], sort_keys=True).encode()).hexdigest()
    return f"step_{info.step}-attempt_{info.attempt}-{digest[:12]}"


def recency_key(info: CheckpointInfo) -> tuple[int, int]:
    """Return the sort key of a checkpoint: the newest is last."""
    return info.attempt, info.step


def _named(name: str) -> CheckpointInfo | None:
    """Return the checkpoint with a name in the store, committed or not. None if the name is not a
    checkpoint's.
    """
    match = _NAME.fullmatch(name)
    return CheckpointInfo(int(match[1]), int(match[2]), Path(name)) if match else None


def _committed(objects: Mapping[str, int]) -> list[CheckpointInfo]:
    names = (name.removesuffix(f"/{COMMITTED}") for name in objects if name.endswith(f"/{COMMITTED}"))
    found = [info for name in names if (info := _named(name)) is not None]
    return sorted(found, key=lambda info: (*recency_key(info), info.path.name))


def _is_ours(name: str) -> bool:
    rest = name.partition("/")[2]
    return rest == COMMITTED or rest.partition("/")[0] in _PARTS


def _check(found: StoreManifest, info: CheckpointInfo, objects: Mapping[str, int]) -> None:
    """Raise `ValueError` for an inconsistent manifest, or one with unsafe file names."""
    if (found.step, found.attempt) != (info.step, info.attempt):
        raise ValueError("it is of another step or attempt")
    if not _ID.fullmatch(found.run.run_id):
        raise ValueError("the id of its run is none")
    if len(msgspec.json.encode(found.run)) > _MOST_RUN or not found.files:
        raise ValueError("it has no files, or too long a history")
    for name, digest in found.files.items():
        first, *others = name.split("/")
        if first not in _PARTS or not others or not all(map(_is_file_name, others)) or len(name) > 1024:
            raise ValueError(f"{name[:80]!r} is no name of a file of a checkpoint")
        if not _SHA256.fullmatch(digest):
            raise ValueError(f"{name} has no SHA-256")
        if name not in objects or found.sizes.get(name) != objects[name]:
            raise ValueError(f"{name} is missing, or not as long as it says")


def _is_file_name(part: str) -> bool:
    return part not in ("", ".", "..") and len(part) <= 255 and part.isprintable() and "\\" not in part


def _same_here(final: Path, manifest: StoreManifest) -> set[str]:
    """Return the files that the step's local directory has with the right size."""
    sizes = {name: final / name for name in manifest.files}
    return {name for name, path in sizes.items() if path.is_file() and _size(path) == manifest.sizes[name]}


def _size(path: Path) -> int:
    return path.stat().st_size


def _make_room(manifest: StoreManifest, incoming: Path, source: str) -> None:
    there = sum(_size(path) for path in incoming.rglob("*") if path.is_file())
    needed, free = sum(manifest.sizes.values()) - there, free_bytes(incoming)
    if needed + reserve_bytes(incoming) > free:
        raise DiskFullError(
            f"The rest of {source} takes {human_bytes(needed)}, and {human_bytes(free)} are free on the file "
            f"system of {incoming.parent}. Free some, or choose another --output-dir."
        )


def _move(incoming: Path, made: Path) -> None:
    for path in list(incoming.iterdir()):
        shutil.move(path, made / path.name)


def _at_once(work: Callable[[str], None], names: Sequence[str]) -> None:
    """Run `work` on several names at a time; the first error cancels the pending ones."""
    pool = ThreadPoolExecutor(_FILES_AT_ONCE, "store")
    try:
        for each in [pool.submit(work, name) for name in names]:
            each.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _reason(error: Exception) -> tuple[str, bool]:
    """Return the reason of an error, and True if a retry is useless."""
    name = type(error).__name__
    text = f"{name}: {(str(error).splitlines() or [''])[0][:300]}"
    if isinstance(error, PermissionError):
        return f"it refuses these credentials ({text})", True
    if "Credentials" in name or "Token" in name or name in ("RefreshError", "ProfileNotFound"):
        return f"there are no credentials for it where its own programs look for them ({text})", True
    if isinstance(error, FileNotFoundError):
        return f"there is no such bucket ({text})", True
    return f"it does not answer, or not as it should ({text})", False
