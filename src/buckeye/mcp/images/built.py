"""Images that were built on this machine: taken from a builder into the store, and found there by name.

Blobs lie where fetched ones do, so nothing of a built image is fetched. `built/` notes which digest a name
stands for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from buckeye.base.storage import read_json, write_file
from buckeye.mcp.images.manifest import MANIFESTS, Blob, ImageReference, Manifest, parse_manifest
from buckeye.mcp.images.registry import Registry
from buckeye.mcp.sandbox.base import PrepareError


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptImage:
    """A built image in the store `folder`; `raw` is its manifest as it was written, of `media_type`."""

    manifest: Manifest
    raw: bytes
    media_type: str
    folder: Path


def keep_layout(layout: Path, reference: ImageReference, folder: Path) -> KeptImage:
    """Take an image out of an OCI layout (a folder with `index.json` and `blobs/`) into the store, under a
    name. The blobs are moved. Raises PrepareError for a layout without an image."""
    try:
        (entry,) = read_json(layout / "index.json")["manifests"]
        digest = str(entry["digest"])
        manifest = _parsed((layout / "blobs" / digest.replace(":", "/")).read_bytes(), digest, reference)
        for one in {digest, manifest.config.digest, *(blob.digest for blob in manifest.layers)}:
            _keep(layout / "blobs" / one.replace(":", "/"), one, folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PrepareError(f"{reference}: the builder left no image that can be read: {error}") from None
    name_built(reference, digest, folder)
    return _kept(digest, reference, folder)


def name_built(reference: ImageReference, digest: str, folder: Path) -> None:
    """Note that the name stands for this image of the store."""
    note = {"name": str(reference), "digest": digest}
    write_file(_note(reference, folder), json.dumps(note))


def find_built(reference: ImageReference, folder: Path) -> KeptImage | None:
    """The image of this name that was built here, or None: nothing was, or parts of it are gone."""
    try:
        digest = str(read_json(_note(reference, folder))["digest"])
        kept = _kept(digest, reference, folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    blobs = (kept.manifest.config, *kept.manifest.layers)
    return kept if all(blob_path(folder, blob.digest).exists() for blob in blobs) else None


def _kept(digest: str, reference: ImageReference, folder: Path) -> KeptImage:
    raw = blob_path(folder, digest).read_bytes()
    manifest = _parsed(raw, digest, reference)
    return KeptImage(manifest=manifest, raw=raw, media_type=_media_type(json.loads(raw)), folder=folder)


def _parsed(raw: bytes, digest: str, reference: ImageReference) -> Manifest:
    content: dict[str, Any] = json.loads(raw)
    if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
        raise ValueError(f"the manifest is not {digest[:19]}")
    return parse_manifest(content, digest=digest, kind=_media_type(content), shown=str(reference))


def _media_type(content: dict[str, Any]) -> str:
    """A manifest of OCI need not say what it is."""
    return str(content.get("mediaType", MANIFESTS[0]))


def _keep(source: Path, digest: str, folder: Path) -> None:
    target = blob_path(folder, digest)
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    shutil.move(source, part)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(target)


def blob_path(folder: Path, digest: str) -> Path:
    """Where in the store the blob with this digest lies."""
    return folder / "blobs" / digest.removeprefix("sha256:")


def _note(reference: ImageReference, folder: Path) -> Path:
    key = hashlib.sha256(str(reference).encode()).hexdigest()[:32]
    return folder / "built" / f"{key}.json"


def push_image(kept: KeptImage, to: ImageReference, progress: Callable[[str], None]) -> None:
    """Upload an image of the store under the name `to`.

    What was uploaded stays with the registry if it is interrupted, so the next push goes on from there.
    Raises PrepareError.
    """
    manifest = kept.manifest
    blobs = {blob.digest: blob for blob in (*manifest.layers, manifest.config)}
    with Registry(to, push=True) as registry:
        try:
            for number, blob in enumerate(blobs.values(), 1):
                progress(f"{to}: piece {number} of {len(blobs)} ({blob.size / 1e6:.1f} MB)")
                if not _has(registry, blob):
                    _upload(registry, blob, blob_path(kept.folder, blob.digest))
            headers = {"content-type": kept.media_type}
            where = f"/manifests/{to.version}"
            with registry.ask("PUT", where, headers=headers, content=kept.raw, expected=(201,)):
                pass
        except httpx.HTTPError as error:
            raise registry.unreachable(error) from None


def _has(registry: Registry, blob: Blob) -> bool:
    with registry.ask("HEAD", f"/blobs/{blob.digest}", expected=(200, 404)) as answer:
        return answer.status_code == 200


def _upload(registry: Registry, blob: Blob, path: Path) -> None:
    with registry.ask("POST", "/blobs/uploads/", content=b"", expected=(202,)) as answer:
        location = registry.absolute(answer.headers.get("location", ""))
    url = httpx.URL(location).copy_merge_params({"digest": blob.digest})
    headers = {"content-type": "application/octet-stream", "content-length": str(path.stat().st_size)}
    with registry.ask("PUT", str(url), headers=headers, content=path, expected=(201,)):
        pass
