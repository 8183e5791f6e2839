"""Upload, download and deletion of checkpoints in an object store. One store URL belongs to one run.

The folder `<url>/step_<N>-attempt_<A>-<id>/` has the files of a checkpoint, and `COMMITTED`. The object
`COMMITTED` has the size and SHA-256 of each file, and is written last. So a folder without `COMMITTED` is an
incomplete upload, not a checkpoint. This module deletes only files of checkpoints.
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
from buckeye.base.columns import counted
from buckeye.base.disk import free_bytes, human_bytes, reserve_bytes
from buckeye.base.distribution import need
from buckeye.base.faults import fault_point
from buckeye.errors import BuckeyeError, CheckpointError, DiskFullError, StoreError
from buckeye.transport.checkpoint import COMMITTED, CheckpointInfo

log = logging.getLogger(__name__)

STORE_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
"""Python module for each URL scheme. Buckeye's optional dependencies have the name of the scheme."""

DOWNLOAD = ".download"
"""Suffix of the name of a folder in `checkpoints/` with an incomplete download."""

_NAME = re.compile(r"step_(0|[1-9]\d{0,11})-attempt_([1-9]\d{0,8})-[0-9a-f]{6,32}")
_ID = re.compile(r"[\w-]{1,64}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PARTS = ("trainer", "orchestrator")
_FILES_AT_ONCE = 4
_PARTS_AT_ONCE = 4  # number of parts of one file to upload at a time
_MAX_MANIFEST_BYTES = 64 * 2**20
_MAX_RUN_BYTES = 2**20
_PAUSES = (1.0, 30.0)  # first and maximum pause in seconds
_REQUEST_SECONDS = 60


class StoreManifest(msgspec.Struct, kw_only=True, frozen=True):
    """Content of `COMMITTED` in a store.

    The fields up to `files` are those of `COMMITTED` in the run directory. `sizes` has the size of every
    file. `kept` has the steps that must not be deleted, such as the best step.
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

    The credentials are those that the AWS and Google tools use. The constructor raises `UsageError` if the
    required module is not installed. All methods raise `StoreError` if the store does not reply, or refuses a
    request.
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
        with self._converted_errors("open"):
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **settings)

    def probe(self) -> None:
        """Write a test object, and delete it. Raise `StoreError` if this fails."""
        name = f"{self._root}/.buckeye-probe-{secrets.token_hex(8)}"
        with self._converted_errors("write to"):
            self._fs.pipe_file(name, b"write test")
        with self._converted_errors("delete objects of"):
            self._fs.rm_file(name)

    def list_checkpoints(self) -> list[CheckpointInfo]:
        """Return the committed checkpoints. The newest is last. Their paths are relative to the store."""
        return _committed(self._objects())

    def manifest(self, info: CheckpointInfo) -> StoreManifest:
        """Return a checkpoint's manifest.

        Raise `CheckpointError` if the manifest does not match the objects or has unsafe file names.
        """
        objects = self._objects(info.path.name)
        if not 0 < objects.get(COMMITTED, 0) <= _MAX_MANIFEST_BYTES:
            raise _damage_error(f"{self.url}/{info.path}/{COMMITTED} is missing, empty or too large")
        with self._converted_errors("read"):
            text = self._fs.cat_file(f"{self._root}/{info.path}/{COMMITTED}")
        try:
            manifest = msgspec.json.decode(text, type=StoreManifest)
            _check_manifest(manifest, info, objects)
        except (ValueError, RecursionError) as error:
            raise _damage_error(f"{self.url}/{info.path}/{COMMITTED} is invalid: {error}") from None
        return manifest

    def upload(
        self,
        directory: Path,
        commit: Mapping[str, Any],
        name: str,
        run: Path,
        *,
        kept: Collection[int] = (),
    ) -> int:
        """Upload the checkpoint in a directory as `name`, and return the number of bytes sent.

        `commit` is the content of its `COMMITTED`, and `run` the run directory. Checkpoints of the steps
        `kept` must not be deleted later. Skip files that are already stored under `name` with an equal size.
        Their content is equal, too, because `name` contains a digest of all file hashes. Raise
        `FileNotFoundError` if the directory is deleted during the upload.
        """
        paths = {file: directory / file for file in commit["files"]}
        sizes = {file: path.stat().st_size for file, path in paths.items()}
        stored_sizes = self._objects(name)
        unsent = [f for f in paths if stored_sizes.get(f) != sizes[f]]

        def put(file: str) -> None:
            with self._converted_errors("write to", local=paths[file]):
                self._fs.put_file(str(paths[file]), f"{self._root}/{name}/{file}")
            fault_point("store.upload")

        _run_in_parallel(put, unsent)
        stored_sizes = self._objects(name)
        incomplete = [f for f in paths if stored_sizes.get(f) != sizes[f]]
        if incomplete:
            raise StoreError(
                f"{self.url}/{name} is incomplete after the upload: {counted(len(incomplete), 'file')} "
                f"missing or too short, such as {incomplete[0]}"
            )
        run_fields = {"run": storage.read_json(run / "run.json"), "kept": sorted(kept)}
        manifest = {**commit, "sizes": {file: stored_sizes[file] for file in paths}, **run_fields}
        fault_point("store.before_commit")
        with self._converted_errors("write to"):
            self._fs.pipe_file(f"{self._root}/{name}/{COMMITTED}", json.dumps(manifest).encode())
        fault_point("store.committed")
        return sum(sizes[file] for file in unsent)

    def prune(self, keep: int | None, *, protected: Collection[int]) -> list[int]:
        """Delete all committed checkpoints except the `keep` newest. Return the deleted steps.

        If `keep` is None, keep all checkpoints. Checkpoints of `protected` steps are always kept. Also delete
        incomplete uploads that are older than the newest checkpoint.
        """
        objects = self._objects()
        committed = _committed(objects)
        if not committed:
            return []
        infos = (_parse_name(name.partition("/")[0]) for name in objects)
        older = {
            info.path.name
            for info in infos
            if info is not None and recency_key(info) < recency_key(committed[-1])
        }
        leftovers = older - {info.path.name for info in committed}
        old = [info for info in committed[: -keep if keep else 0] if info.step not in protected]
        for folder in [*(info.path.name for info in old), *sorted(leftovers)]:
            files = [name for name in objects if name.startswith(f"{folder}/") and _is_checkpoint_file(name)]
            self._delete(sorted(files, key=lambda name: not name.endswith(COMMITTED)))
        self._abort_uploads(committed[-1])
        return [info.step for info in old]

    def download(self, info: CheckpointInfo, root: Path) -> None:
        """Download a checkpoint, verify it, and then rename it to its folder in `root`.

        Intact files of an interrupted download are reused. Raise `CheckpointError` for a damaged file. Raise
        `DiskFullError` if the disk has too little space.
        """
        manifest = self.manifest(info)
        final, incoming = storage.step_directory(root, info.step), root / f".{info.path.name}{DOWNLOAD}"
        incoming.mkdir(parents=True, exist_ok=True)
        _check_room(manifest, incoming, f"{self.url}/{info.path}")
        began = time.monotonic()
        size = human_bytes(sum(manifest.sizes.values()))
        log.info("Downloading the checkpoint of step %d: %s", info.step, size)

        def get(file: str) -> None:
            target = incoming / file
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                self._get(f"{self._root}/{info.path}/{file}", target, manifest.files[file])
            except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
                raise _damage_error(f"{self.url}/{info.path} has conflicting file names: {error}") from None
            fault_point("store.download")

        _run_in_parallel(get, list(manifest.files))
        (incoming / COMMITTED).write_bytes(msgspec.json.encode(manifest))
        storage.write_directory(final, lambda directory: _move(incoming, directory), replace=True)
        for leftover in root.glob(f".*{DOWNLOAD}"):
            shutil.rmtree(leftover, ignore_errors=True)
        log.info("Downloaded the checkpoint of step %d in %.1f s", info.step, time.monotonic() - began)

    @staticmethod
    def retry(work: Callable[[], object], *, seconds: float) -> None:
        """Call `work` until it does not raise `StoreError`.

        Raise the error if the store denies access, or if the next attempt would start after `seconds`.
        """
        began, (pause, max_pause) = time.monotonic(), _PAUSES
        attempts = 0
        while True:
            try:
                work()
                return
            except StoreError as error:
                attempts += 1
                if error.denied or time.monotonic() + pause > began + seconds:
                    raise
                log.warning("Attempt %d failed, retrying in %.0f s: %s", attempts, pause, error)
            time.sleep(pause)
            pause = min(max_pause, 2 * pause)

    def _get(self, source: str, target: Path, digest: str) -> None:
        if target.is_file() and storage.sha256_file(target) == digest:
            return
        target.unlink(missing_ok=True)
        with self._converted_errors("read"):
            self._fs.get_file(source, str(target))
        if storage.sha256_file(target) != digest:
            target.unlink()
            name = self.url + source.removeprefix(self._root)
            raise _damage_error(f"{name} is damaged: its SHA-256 differs from the committed one")

    def _objects(self, folder: str = "") -> dict[str, int]:
        """Return the size of each object in a folder, by its name relative to the folder."""
        path = f"{self._root}/{folder}" if folder else self._root
        with self._converted_errors("list"):
            self._fs.invalidate_cache()
            objects = self._fs.find(path, detail=True)
        return {name[len(path) + 1 :]: int(info["size"]) for name, info in objects.items() if name != path}

    def _delete(self, names: Sequence[str]) -> None:
        with self._converted_errors("delete objects of"):
            for name in names:
                self._fs.rm_file(f"{self._root}/{name}")
                fault_point("store.deleted")

    def _abort_uploads(self, newest: CheckpointInfo) -> None:
        """Abort interrupted multipart uploads of files.

        S3 does not list the uploaded parts as objects, but stores and bills them.
        """
        if not hasattr(self._fs, "call_s3"):  # other stores delete interrupted uploads automatically
            return
        bucket, prefix, _ = self._fs.split_path(f"{self._root}/step_")
        with self._converted_errors("abort uploads to"):
            listed = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
            for upload in listed.get("Uploads", []):
                info = _parse_name(upload["Key"].removeprefix(prefix[: -len("step_")]).partition("/")[0])
                if info is not None and recency_key(info) <= recency_key(newest):
                    self._fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])

    @contextmanager
    def _converted_errors(self, action: str, *, local: Path | None = None) -> Iterator[None]:
        """Convert errors of fsspec to `StoreError`, except the error for a missing `local` file."""
        try:
            yield
        except BuckeyeError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and local is not None and not local.exists():
                raise
            reason, denied, hint = _explain(error)
            raise StoreError(f"cannot {action} {self.url}: {reason}", denied=denied, hint=hint) from None


def name_in_store(info: CheckpointInfo, commit: Mapping[str, Any]) -> str:
    """Return the name in the store for a checkpoint of a run directory. It depends only on the content."""
    digest = hashlib.sha256(json.dumps(commit["files"], sort_keys=True).encode()).hexdigest()
    return f"step_{info.step}-attempt_{info.attempt}-{digest[:12]}"


def recency_key(info: CheckpointInfo) -> tuple[int, int]:
    """Return the sort key of a checkpoint: the newest is last."""
    return info.attempt, info.step


class _Attempt(msgspec.Struct, kw_only=True, frozen=True):
    attempt: int
    started: float
    resumed_step: int | None


class _Run(msgspec.Struct, kw_only=True, frozen=True):
    """Content of `run.json`, which a run needs to resume after its directory is lost."""

    run_id: str
    attempt: int
    attempts: list[_Attempt]


def _damage_error(message: str) -> CheckpointError:
    return CheckpointError(message, code="BK-CHECKPOINT-DAMAGED")


def _parse_name(name: str) -> CheckpointInfo | None:
    """Parse the name of a checkpoint folder. Return None for other names. `COMMITTED` need not exist."""
    match = _NAME.fullmatch(name)
    return CheckpointInfo(int(match[1]), int(match[2]), Path(name)) if match else None


def _committed(objects: Mapping[str, int]) -> list[CheckpointInfo]:
    names = (name.removesuffix(f"/{COMMITTED}") for name in objects if name.endswith(f"/{COMMITTED}"))
    infos = [info for name in names if (info := _parse_name(name)) is not None]
    return sorted(infos, key=lambda info: (*recency_key(info), info.path.name))


def _is_checkpoint_file(name: str) -> bool:
    file = name.partition("/")[2]
    return file == COMMITTED or file.partition("/")[0] in _PARTS


def _check_manifest(manifest: StoreManifest, info: CheckpointInfo, objects: Mapping[str, int]) -> None:
    """Raise `ValueError` if a manifest does not match the name and objects, or has unsafe file names."""
    if (manifest.step, manifest.attempt) != (info.step, info.attempt):
        raise ValueError("it is of another step or attempt")
    if not _ID.fullmatch(manifest.run.run_id):
        raise ValueError("the run id is invalid")
    if not manifest.files:
        raise ValueError("it lists no files")
    if len(msgspec.json.encode(manifest.run)) > _MAX_RUN_BYTES:
        raise ValueError("the history of the run is too long")
    for name, digest in manifest.files.items():
        part, *others = name.split("/")
        if part not in _PARTS or not others or not all(map(_is_file_name, others)) or len(name) > 1024:
            raise ValueError(f"{name[:80]!r} is not the name of a checkpoint file")
        if not _SHA256.fullmatch(digest):
            raise ValueError(f"the SHA-256 of {name} is invalid")
        if name not in objects or manifest.sizes.get(name) != objects[name]:
            raise ValueError(f"{name} is missing, or its size differs")


def _is_file_name(part: str) -> bool:
    return part not in ("", ".", "..") and len(part) <= 255 and part.isprintable() and "\\" not in part


def _check_room(manifest: StoreManifest, incoming: Path, source: str) -> None:
    downloaded = sum(path.stat().st_size for path in incoming.rglob("*") if path.is_file())
    needed, free = sum(manifest.sizes.values()) - downloaded, free_bytes(incoming)
    if needed + reserve_bytes(incoming) > free:
        raise DiskFullError(
            f"not enough disk space to download {source}: {human_bytes(needed)} needed, {human_bytes(free)} "
            f"free on the file system of {incoming.parent}",
            hint="free disk space, or choose another --output-dir",
        )


def _move(incoming: Path, directory: Path) -> None:
    for path in list(incoming.iterdir()):
        shutil.move(path, directory / path.name)


def _run_in_parallel(work: Callable[[str], None], names: Sequence[str]) -> None:
    """Call `work` for each name, in several threads. After the first error, start no further calls."""
    pool = ThreadPoolExecutor(_FILES_AT_ONCE, "store")
    try:
        for future in [pool.submit(work, name) for name in names]:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _explain(error: Exception) -> tuple[str, bool, str | None]:
    """Return the reason of an error as text, True if a retry cannot help, and a hint."""
    name = type(error).__name__
    text = f"{name}: {(str(error).splitlines() or [''])[0][:300]}"
    if isinstance(error, PermissionError):
        return f"permission denied ({text})", True, "check the credentials and their rights"
    if "Credentials" in name or "Token" in name or name in ("RefreshError", "ProfileNotFound"):
        return f"no valid credentials found ({text})", True, "log in with the tool of the provider"
    if isinstance(error, FileNotFoundError):
        return f"the bucket does not exist ({text})", True, "check ckpt.store, or create the bucket"
    return f"no reply, or an unexpected one ({text})", False, None
