"""Names of images, and what an image is made of: a manifest, and the blobs that it names by digest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from buckeye.errors import UsageError
from buckeye.mcp.sandbox.base import PrepareError

DOCKER_HUB = "registry-1.docker.io"
_HUB_NAMES = {"docker.io", "index.docker.io", DOCKER_HUB}
_PATH = re.compile(
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*", re.ASCII
)
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_HOST = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(?::\d{1,5})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ImageReference:
    """A parsed `[HOST[:PORT]/]PATH[:TAG][@DIGEST]`. `version` is the digest if there is one, else the tag."""

    registry: str
    repository: str
    version: str

    def __str__(self) -> str:
        separator = "@" if self.version.startswith("sha256:") else ":"
        return f"{self.registry}/{self.repository}{separator}{self.version}"


def parse_reference(text: str) -> ImageReference:
    """As docker reads it: without a host it is on Docker Hub, without a tag it is `latest`. Raises
    UsageError."""
    rest, _, digest = text.partition("@")
    first, slash, path = rest.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry = DOCKER_HUB if first in _HUB_NAMES else first
    else:
        registry, path = DOCKER_HUB, rest
    path, colon, tag = path.partition(":")
    if registry == DOCKER_HUB and "/" not in path:
        path = f"library/{path}"
    valid = _HOST.fullmatch(registry) and _PATH.fullmatch(path) and (not colon or _TAG.fullmatch(tag))
    if not valid or ("@" in text and not _DIGEST.fullmatch(digest)):
        raise UsageError(
            f"{text!r} is not the name of an image. Write NAME:TAG, ORG/NAME:TAG, HOST:PORT/ORG/NAME:TAG or "
            "...@sha256:DIGEST, in small letters."
        )
    return ImageReference(registry, path, digest or tag or "latest")


MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
"""Media types of a manifest of one image for one platform."""
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
"""Media types of a list of such manifests."""
MAX_LAYERS, MAX_PACKED_BYTES = 500, 64 * 2**30
"""Of one image."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


class Blob(msgspec.Struct, frozen=True):
    """A piece of an image, by its digest."""

    digest: Annotated[str, msgspec.Meta(pattern=rf"^{_DIGEST.pattern}\Z")]
    size: Annotated[int, msgspec.Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True):
    """What one image for one platform is made of."""

    config: Blob
    layers: tuple[Blob, ...]
    digest: str = ""


def parse_manifest(content: dict[str, Any], *, digest: str, kind: str, shown: str) -> Manifest:
    """The manifest in `content`, of the media type `kind`; `shown` names the image. Raises PrepareError."""
    if kind not in MANIFESTS or not isinstance(content.get("layers"), list):
        raise PrepareError(f"image {shown}: a manifest of type {kind!r} is not understood.")
    try:
        manifest = msgspec.convert({**content, "digest": digest}, Manifest)
    except msgspec.ValidationError:
        raise PrepareError(f"image {shown}: its manifest is damaged.") from None
    if len(manifest.layers) > MAX_LAYERS or sum(one.size for one in manifest.layers) > MAX_PACKED_BYTES:
        raise PrepareError(
            f"image {shown} has more than {MAX_LAYERS} layers or {MAX_PACKED_BYTES // 2**30} GiB to download."
        )
    return manifest
