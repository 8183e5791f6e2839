"""Who may ask, and what for: the key, the address a browser believes it talks to, the environment wished."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from buckeye.envs.gateway.address import is_loopback
from buckeye.envs.gateway.settings import API_KEY_VARIABLE, GatewaySettings

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*", re.ASCII)
_MAX_VARIABLES = 100


class Refusal(Exception):
    """A request is answered with an error. `reason` is for programs, the message for people."""

    def __init__(self, status: int, reason: str, message: str, *, code: int = -32600) -> None:
        super().__init__(message)
        self.status, self.reason, self.code = status, reason, code
        self.data: dict[str, object] = {}


@dataclass(frozen=True, slots=True)
class Wish:
    """The environment a session asks for: an image ("" where none is named) and variables for its process."""

    image: str
    variables: tuple[tuple[str, str], ...]


def check_access(headers: Mapping[str, str], settings: GatewaySettings) -> None:
    """Raises Refusal 403 for a page of another site (a browser tricked by DNS rebinding sends a foreign
    `Host`, or an `Origin`), and 401 without the key."""
    host = _host_of(f"//{headers.get('host', '')}")
    if is_loopback(settings.host) and not is_loopback(host):
        raise Refusal(403, "host", f"This gateway answers to localhost, and not to Host: {host!r}.")
    origin = headers.get("origin")
    if origin is not None and _host_of(origin) != host and not is_loopback(_host_of(origin)):
        raise Refusal(403, "origin", f"Pages of {origin!r} may not use this gateway.")
    if settings.api_key is None:
        return
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(
        given.strip().encode(), settings.api_key.encode()
    ):
        message = f"Send the gateway's key, {API_KEY_VARIABLE} where it runs, as `Authorization: Bearer ...`."
        raise Refusal(401, "key", message)


def read_wish(headers: Mapping[str, str], default_image: str) -> Wish:
    """`Mcp-Image`, or else the default, and `Env-Foo-Bar: v` as FOO_BAR=v. Raises Refusal 400 for a header
    that names no variable."""
    variables = {}
    for header, value in headers.items():
        if not header.lower().startswith("env-"):
            continue
        name = header[4:].upper().replace("-", "_")
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise Refusal(400, "variable", f"The header {header} stands for no variable: write Env-NAME.")
        variables[name] = value
    if len(variables) > _MAX_VARIABLES:
        raise Refusal(400, "variable", f"{len(variables)} Env- headers; at most {_MAX_VARIABLES} are taken.")
    image = headers.get("mcp-image", "").strip() or default_image
    return Wish(image, tuple(sorted(variables.items())))


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
