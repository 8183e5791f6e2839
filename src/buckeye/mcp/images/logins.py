"""Registry logins that docker and podman have stored."""

from __future__ import annotations

import os
from pathlib import Path

from buckeye.base.storage import read_json
from buckeye.mcp.images.manifest import DOCKER_HUB

_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "docker.io", DOCKER_HUB)


def find_login(registry: str) -> dict[str, str]:
    """Return the HTTP basic authentication header for a registry host, or {} without a login."""
    keys = _HUB_KEYS if registry == DOCKER_HUB else (registry, f"https://{registry}")
    for key in keys:
        try:
            auth = str(read_json(_login_file())["auths"][key]["auth"])
        except (OSError, ValueError, LookupError, TypeError):
            continue
        return {"authorization": f"Basic {auth}"}
    return {}


def _login_file() -> Path:
    docker = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    return Path(os.environ.get("REGISTRY_AUTH_FILE") or docker / "config.json")
