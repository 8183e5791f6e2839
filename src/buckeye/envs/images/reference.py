"""Names of images: `[HOST[:PORT]/]PATH[:TAG][@DIGEST]`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from buckeye.errors import UsageError

DOCKER_HUB = "registry-1.docker.io"
_HUB_NAMES = {"docker.io", "index.docker.io", DOCKER_HUB}
_PATH = re.compile(
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*", re.ASCII
)
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_HOST = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(?::\d{1,5})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ImageReference:
    """A parsed name. `version` is a digest if there is one, else the tag."""

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
