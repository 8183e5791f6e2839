"""Names of container images: `registry:5000/org/env:tag@sha256:...`, taken apart."""

from __future__ import annotations

import re
from dataclasses import dataclass

_REFERENCE = re.compile(
    r"(?P<name>(?:[A-Za-z0-9][A-Za-z0-9.\-]*(?::\d+)?/)?[a-z0-9]+(?:(?:[./]|_{1,2}|-+)[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.\-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{6,64}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class ImageName:
    """An image: `name` with its registry, `tag` and `digest` (`sha256:...`), "" where there is none."""

    name: str
    tag: str = ""
    digest: str = ""

    @property
    def tagged(self) -> str:
        """Name and tag, for people and for starting it: the digest may be one of this machine only. Name and
        digest if there is no tag."""
        if self.tag:
            return f"{self.name}:{self.tag}"
        return f"{self.name}@{self.digest}" if self.digest else self.name

    @property
    def short(self) -> str:
        """The last part of the name, which files and jobs are called after."""
        return self.name.rpartition("/")[2]


def parse_image(text: str) -> ImageName | None:
    """The parts of a reference; None if it is none."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        return None
    return ImageName(match["name"], match["tag"] or "", match["digest"] or "")
