"""Image names, and image manifests with the blobs that they reference by digest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from buckeye.errors import UsageError
from buckeye.mcp.sandbox.runtime import PrepareError
from buckeye.mcp.tasks.lock_file import parse_image

DOCKER_HUB = "registry-1.docker.io"
_HUB_NAMES = {"docker.io", "index.docker.io", DOCKER_HUB}


@dataclass(frozen=True, slots=True)
class ImageReference:
    """A parsed `[HOST[:PORT]/]PATH[:TAG][@DIGEST]`. `version` is the digest if given, else the tag."""

    registry: str
    repository: str
    version: str

    def __str__(self) -> str:
        separator = "@" if self.version.startswith("sha256:") else ":"
        return f"{self.registry}/{self.repository}{separator}{self.version}"


def parse_reference(text: str) -> ImageReference:
    """Parse an image name like docker. Raises UsageError.

    A name without a host is on Docker Hub; a name without a tag has the tag `latest`.
    """
    image = parse_image(text)
    name = "" if image is None or (image.digest and not _DIGEST.fullmatch(image.digest)) else image.name
    first, slash, path = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry = DOCKER_HUB if first in _HUB_NAMES else first
    else:
        registry, path = DOCKER_HUB, name
    if image is None or not path or path != path.lower():
        raise UsageError(
            f"{text!r} is not the name of an image. Write NAME:TAG, ORG/NAME:TAG, HOST:PORT/ORG/NAME:TAG or "
            "...@sha256:DIGEST, in small letters."
        )
    path = f"library/{path}" if registry == DOCKER_HUB and "/" not in path else path
    return ImageReference(registry, path, image.digest or image.tag or "latest")


MAX_LAYERS, MAX_PACKED_BYTES = 500, 64 * 2**30
"""Maximum layers and compressed bytes of one image."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


class Blob(msgspec.Struct, frozen=True):
    """A content-addressed part of an image."""

    digest: Annotated[str, msgspec.Meta(pattern=rf"^{_DIGEST.pattern}\Z")]
    size: Annotated[int, msgspec.Meta(ge=0)]


class ImageManifest(msgspec.Struct, frozen=True):
    """Parts of one image for one platform."""

    config: Blob
    layers: tuple[Blob, ...]
    digest: str = ""


def parse_manifest(content: dict[str, Any], *, digest: str, shown: str) -> ImageManifest:
    """Return the parsed manifest. `shown` is the image's name in messages. Raises PrepareError."""
    if not isinstance(content.get("layers"), list):
        raise PrepareError(f"image {shown}: its manifest is not understood.")
    try:
        manifest = msgspec.convert({**content, "digest": digest}, ImageManifest)
    except msgspec.ValidationError:
        raise PrepareError(f"image {shown}: its manifest is damaged.") from None
    if len(manifest.layers) > MAX_LAYERS or sum(one.size for one in manifest.layers) > MAX_PACKED_BYTES:
        most = f"{MAX_LAYERS} layers or {MAX_PACKED_BYTES // 2**30} GiB to download"
        raise PrepareError(f"image {shown} has more than {most}.")
    return manifest
