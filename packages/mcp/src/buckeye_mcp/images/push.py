"""Uploading an image: its blobs, unless the registry has them, then its manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx

from buckeye_mcp.images.built import KeptImage
from buckeye_mcp.images.manifest import Blob, ImageReference
from buckeye_mcp.images.registry import Registry


def push_image(
    kept: KeptImage, to: ImageReference, *, progress: Callable[[str], None] = lambda _: None
) -> None:
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
                    _upload(registry, blob, kept.path(blob.digest))
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
