"""Store the images that buildah built on this machine, as OCI layouts (`index.json` and `blobs/`)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from buckeye.base.storage import read_json
from buckeye.mcp.images.manifest import ImageManifest, ImageReference, parse_manifest
from buckeye.mcp.sandbox.runtime import PrepareError


def keep_layout(layout: Path, reference: ImageReference, folder: Path) -> ImageManifest:
    """Move a layout into the store `folder`. Replace the earlier layout of the name `reference`.

    Raises PrepareError if the layout does not contain a complete image.
    """
    try:
        manifest = _read_manifest(layout, reference)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PrepareError(f"image {reference}: cannot read the builder's output: {error}") from None
    target = built_layout(reference, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        target.rename(layout.with_name(f"{layout.name}.before"))
    layout.rename(target)
    return manifest


def find_built(reference: ImageReference, folder: Path) -> ImageManifest | None:
    """Return the locally built image of this name, or None if it is missing or incomplete."""
    try:
        return _read_manifest(built_layout(reference, folder), reference)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def built_layout(reference: ImageReference, folder: Path) -> Path:
    """Return the path of an image's layout in the store `folder`."""
    return folder / "built" / hashlib.sha256(str(reference).encode()).hexdigest()[:32]


def layout_blob(layout: Path, digest: str) -> Path:
    """Return the path of a blob in a layout."""
    return layout / "blobs" / digest.replace(":", "/")


def _read_manifest(layout: Path, reference: ImageReference) -> ImageManifest:
    (entry,) = read_json(layout / "index.json")["manifests"]
    digest = str(entry["digest"])
    raw = layout_blob(layout, digest).read_bytes()
    if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
        raise ValueError("the manifest does not match its digest")
    content = json.loads(raw)
    manifest = parse_manifest(content, digest=digest, name=str(reference))
    for blob in (manifest.config, *manifest.layers):
        layout_blob(layout, blob.digest).stat()
    return manifest
