"""Logins to registries, from where docker and podman keep them."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buckeye.base.storage import read_json
from buckeye.mcp.images.manifest import DOCKER_HUB

_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "docker.io")
_HELPER_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Login:
    """A user and a password (or token), or an identity token alone."""

    user: str
    password: str = field(repr=False)
    is_token: bool = False

    def header(self) -> dict[str, str]:
        """For HTTP's basic authentication."""
        pair = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        return {"authorization": f"Basic {pair}"}


def find_login(registry: str) -> Login | None:
    """The login for a registry host; None if nobody has logged in there."""
    keys = (*_HUB_KEYS, DOCKER_HUB) if registry == DOCKER_HUB else (registry, f"https://{registry}")
    for file in _files():
        try:
            config = read_json(file)
        except (OSError, ValueError):
            continue
        for key in keys:
            login = _helped(config, key) or _stored(_table(config, "auths").get(key))
            if login is not None:
                return login
    return None


def _files() -> list[Path]:
    """In the order in which they are asked."""
    docker = os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker"
    files = [Path(docker) / "config.json"]
    if named := os.environ.get("REGISTRY_AUTH_FILE"):
        files.insert(0, Path(named))
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        files.append(Path(runtime) / "containers" / "auth.json")
    return files


def _stored(entry: Any) -> Login | None:
    if not isinstance(entry, dict):
        return None
    if token := entry.get("identitytoken"):
        return Login("<token>", str(token), is_token=True)
    try:
        user, _, password = base64.b64decode(str(entry.get("auth", ""))).decode().partition(":")
    except ValueError:
        return None
    return Login(user, password.rstrip("\0")) if user else None


def _table(config: Any, name: str) -> dict[str, Any]:
    """A table of a file; empty where there is none."""
    found = config.get(name) if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def _helped(config: Any, key: str) -> Login | None:
    store = config.get("credsStore") if key in _table(config, "auths") else None
    name = _table(config, "credHelpers").get(key) or store
    program = shutil.which(f"docker-credential-{name}") if name else None
    if program is None:
        return None
    try:
        ran = subprocess.run(  # noqa: S603  a list of words, without a shell
            [program, "get"], input=key, capture_output=True, text=True, timeout=_HELPER_SECONDS, check=False
        )
        answer = json.loads(ran.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired):
        return None
    return Login(user, secret, is_token=user == "<token>")
