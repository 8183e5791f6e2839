"""Which distributions the extras of buckeye-rl bring.

In a checkout they are the folders of `packages/`, so that `pip install '.[train]'` needs no index that has
them. What is built for an index (BUCKEYE_RELEASE=1), or from an archive without those folders, names the same
version of each.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

SATELLITES = ("mcp", "adapters", "audit", "machines", "ui")


class Extras(MetadataHookInterface):
    """Fills `optional-dependencies` from the table `extras` of this hook."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Replace `buckeye-mcp` and the like by where it is."""
        packages, version = Path(self.root, "packages"), metadata.get("version")
        here = packages.is_dir() and os.environ.get("BUCKEYE_RELEASE") != "1"

        def located(line: str) -> str:
            name = line.removeprefix("buckeye-")
            if name not in SATELLITES:
                return line
            return f"{line} @ {(packages / name).as_uri()}" if here else f"{line}=={version}"

        metadata["optional-dependencies"] = {
            extra: [located(line) for line in lines] for extra, lines in self.config["extras"].items()
        }
