"""Parse image names and image manifests. A manifest lists the digests of an image's blobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from buckeye.errors import UsageError
from buckeye.mcp.sandbox.runtime import PrepareError
from buckeye.mcp.tasks.lock_file import parse_image

DOCKER_HUB = "registry-1.docker.io"
MAX_LAYERS, MAX_PACKED_BYTES = 500, 64 * 2**30
"""Maximum layers and compressed bytes of one image."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
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
    """Parse an image name by the rules of Docker. Raises UsageError for an invalid name.

    A name without a host is on Docker Hub. A name without a tag has the tag `latest`.
    """
    image = parse_image(text)
    name = "" if image is None or (image.digest and not _DIGEST.fullmatch(image.digest)) else image.name
    host, slash, path = name.partition("/")
    if slash and ("." in host or ":" in host or host == "localhost"):
        registry = DOCKER_HUB if host in _HUB_NAMES else host
    else:
        registry, path = DOCKER_HUB, name
    if image is None or not path or path != path.lower():
        raise UsageError(
            f"invalid image name {text!r}",
            code="BK-IMAGE",
            hint="write NAME:TAG, ORG/NAME:TAG, HOST:PORT/ORG/NAME:TAG or NAME@sha256:DIGEST in lower case",
        )
    path = f"library/{path}" if registry == DOCKER_HUB and "/" not in path else path
    return ImageReference(registry, path, image.digest or image.tag or "latest")


class Blob(msgspec.Struct, frozen=True):
    """Part of an image, such as a layer, with its digest and its size in bytes."""

    digest: Annotated[str, msgspec.Meta(pattern=rf"^{_DIGEST.pattern}\Z")]
    size: Annotated[int, msgspec.Meta(ge=0)]


class ImageManifest(msgspec.Struct, frozen=True):
    """Blobs of an image for one platform: the configuration, and the layers from bottom to top."""

    config: Blob
    layers: tuple[Blob, ...]
    digest: str = ""


def parse_manifest(content: dict[str, Any], *, digest: str, name: str) -> ImageManifest:
    """Return the parsed manifest. Raises PrepareError, with the image's `name`, for an invalid manifest."""
    if not isinstance(content.get("layers"), list):
        raise PrepareError(
            f"image {name}: unsupported manifest: no list `layers`", hint="push the image in the OCI format"
        )
    try:
        manifest = msgspec.convert({**content, "digest": digest}, ImageManifest)
    except msgspec.ValidationError:
        raise PrepareError(f"image {name}: invalid manifest") from None
    if len(manifest.layers) > MAX_LAYERS or sum(layer.size for layer in manifest.layers) > MAX_PACKED_BYTES:
        limit = f"{MAX_LAYERS} layers or {MAX_PACKED_BYTES // 2**30} GiB to download"
        raise PrepareError(f"image {name} has more than {limit}")
    return manifest
