"""What an image is made of: its manifest, and the blobs that it names by their digests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from buckeye.envs.runtimes.base import PrepareError

MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
"""Media types of a manifest of one image for one platform."""
MAX_LAYERS, MAX_PACKED_BYTES = 500, 64 * 2**30
"""Of one image."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Blob:
    """A piece of an image, by its digest."""

    digest: str
    size: int
    media_type: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one image for one platform is made of."""

    digest: str
    config: Blob
    layers: tuple[Blob, ...]


def parse_manifest(content: dict[str, Any], *, digest: str, kind: str, shown: str) -> Manifest:
    """The manifest in `content`, of the media type `kind`; `shown` names the image. Raises PrepareError."""
    if kind not in MANIFESTS or not isinstance(content.get("layers"), list):
        raise PrepareError(f"image {shown}: a manifest of type {kind!r} is not understood.")
    try:
        layers = tuple(_blob(entry) for entry in content["layers"])
        manifest = Manifest(digest, _blob(content["config"]), layers)
    except (KeyError, TypeError, ValueError):
        raise PrepareError(f"image {shown}: its manifest is damaged.") from None
    if len(manifest.layers) > MAX_LAYERS or sum(one.size for one in manifest.layers) > MAX_PACKED_BYTES:
        raise PrepareError(
            f"image {shown} has more than {MAX_LAYERS} layers or {MAX_PACKED_BYTES // 2**30} GiB to download."
        )
    return manifest


def _blob(entry: dict[str, Any]) -> Blob:
    digest, size = str(entry["digest"]), int(entry["size"])
    if not _DIGEST.fullmatch(digest) or size < 0:
        raise ValueError(digest)
    return Blob(digest, size, str(entry.get("mediaType", "")))
