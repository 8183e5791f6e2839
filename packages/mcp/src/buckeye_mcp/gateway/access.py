"""What a session asks for, and how a request is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from buckeye_mcp.gateway.settings import GatewaySettings

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


def read_wish(headers: Mapping[str, str], settings: GatewaySettings) -> Wish:
    """`Mcp-Image`, or else the default, and `Env-Foo-Bar: v` as FOO_BAR=v. Raises Refusal 400 for a header
    that names no variable, and 403 for a variable that clients may not set here."""
    variables = {}
    for header, value in headers.items():
        if not header.lower().startswith("env-"):
            continue
        name = header[4:].upper().replace("-", "_")
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise Refusal(400, "variable", f"The header {header} stands for no variable: write Env-NAME.")
        if name not in settings.variables:
            raise Refusal(
                403,
                "variable",
                f"Clients of this gateway may not set {name}. Name it where the gateway is started: "
                f"--variable {name}.",
            )
        variables[name] = value
    if len(variables) > _MAX_VARIABLES:
        raise Refusal(400, "variable", f"{len(variables)} Env- headers; at most {_MAX_VARIABLES} are taken.")
    image = headers.get("mcp-image", "").strip() or settings.image
    return Wish(image, tuple(sorted(variables.items())))
