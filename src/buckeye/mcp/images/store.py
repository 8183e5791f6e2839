"""Fetch images and keep them unpacked on disk, by digest."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from buckeye.base.storage import find_leftovers, read_json, write_file
from buckeye.mcp.images.local_layouts import built_layout, find_built, layout_blob
from buckeye.mcp.images.manifest import Blob, ImageManifest, parse_reference
from buckeye.mcp.images.registry import Registry
from buckeye.mcp.images.unpack import unpack_layers
from buckeye.mcp.sandbox.runtime import PrepareError

log = logging.getLogger(__name__)

_MAX_CONFIG = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Image:
    """Unpacked image: its root file system, which nothing may change, and its run configuration."""

    root: Path
    argv: tuple[str, ...]
    variables: dict[str, str]
    cwd: str


def fetch_image(name: str, folder: Path, *, owner: int | None) -> Image:
    """Return the unpacked image `name`.

    Use the image that was built on this machine, else the image of the registry, else the last download.
    `folder` stores downloaded and unpacked images. All files belong to the user `owner`, if given. Several
    processes may call this at once. Raises PrepareError, or UsageError for an invalid name.
    """
    reference = parse_reference(name)
    built = find_built(reference, folder)
    if built is not None:
        layout = built_layout(reference, folder)
        return _load_or_unpack(built, lambda blob: layout_blob(layout, blob.digest), name, folder, owner)
    known = folder / "names" / hashlib.sha256(str(reference).encode()).hexdigest()[:32]
    with Registry(reference) as registry:
        try:
            manifest = registry.manifest()
        except PrepareError as error:
            if not known.exists():
                raise
            log.warning("Using the last downloaded version of image %s: %s", reference, error)
            return _read_image(folder / "images" / _key(known.read_text(), owner), name)
        image = _load_or_unpack(
            manifest, lambda blob: registry.fetch(blob, folder / "blobs"), name, folder, owner
        )
    write_file(known, manifest.digest)
    return image


FetchBlob = Callable[[Blob], Path]
"""Function that returns the file of a blob, after downloading the blob if necessary."""


def _load_or_unpack(
    manifest: ImageManifest, fetch: FetchBlob, name: str, folder: Path, owner: int | None
) -> Image:
    target = folder / "images" / _key(manifest.digest, owner)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _unpack(manifest, fetch, name, target, owner)
    return _read_image(target, name)


def _unpack(manifest: ImageManifest, fetch: FetchBlob, name: str, target: Path, owner: int | None) -> None:
    for leftover in find_leftovers(target.parent):
        shutil.rmtree(leftover, ignore_errors=True)
    log.info("Unpacking %s (%d layers)", name, len(manifest.layers))
    if manifest.config.size > _MAX_CONFIG:
        raise PrepareError(f"image {name}: the configuration is larger than {_MAX_CONFIG:,} bytes")
    config_file, *layers = [fetch(blob) for blob in (manifest.config, *manifest.layers)]
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        config = read_json(config_file)
        root = temporary / "root"
        root.mkdir(parents=True)
        unpack_layers(layers, config["rootfs"]["diff_ids"], root, owner=owner)
        (temporary / "image.json").write_text(json.dumps({"config": config}))
        os.sync()
        temporary.rename(target)
    except PrepareError as error:
        raise error.prefixed(f"cannot unpack image {name}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PrepareError(f"cannot unpack image {name}: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _RunConfig(msgspec.Struct, rename="pascal"):
    """Run configuration of an image, with the field names of the OCI specification."""

    env: list[str] | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    working_dir: str | None = None


def _read_image(target: Path, name: str) -> Image:
    content = read_json(target / "image.json")
    try:
        run = msgspec.convert(content["config"].get("config") or {}, _RunConfig)
    except msgspec.ValidationError as error:
        raise PrepareError(f"image {name}: invalid configuration: {error}") from None
    return Image(
        root=target / "root",
        argv=(*(run.entrypoint or ()), *(run.cmd or ())),
        variables=dict(entry.partition("=")[::2] for entry in run.env or ()),
        cwd=run.working_dir or "/",
    )


def _key(digest: str, owner: int | None) -> str:
    return digest.removeprefix("sha256:") + ("" if owner is None else f"-{owner}")
