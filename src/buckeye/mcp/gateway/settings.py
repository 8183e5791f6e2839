"""Settings of a gateway, and the request headers that select a session's environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from buckeye.base.request_gate import is_loopback
from buckeye.errors import UsageError

API_KEY_VARIABLE = "BUCKEYE_API_KEY"
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*", re.ASCII)
_OF_LOADERS = re.compile(
    r"(LD|DYLD|PYTHON|PERL|RUBY|JAVA|JDK|NODE|NPM|PIP|UV|GIT|BASH|DOTNET|COR|CORECLR|LUA|PHP|R|GCONV|MALLOC|GLIBC)_"
    r".*|PYTHON.*|PERL.*|RUBY.*|_?JAVA_.*|NODE_.*|DOCKER_.*|CONTAINER.*|APPTAINER.*|SINGULARITY.*|BUCKEYE_.*"
)
_OF_THE_SYSTEM = {
    "BASH_ENV", "CDPATH", "CLASSPATH", "EDITOR", "ENV", "GLOBIGNORE", "HOME", "HOSTALIASES", "IFS", "LOCPATH",
    "LOGNAME", "NLSPATH", "PAGER", "PATH", "PROMPT_COMMAND", "PS4", "PWD", "RES_OPTIONS", "SHELL",
    "SHELLOPTS", "TMPDIR", "USER", "VISUAL",
}  # fmt: skip
DEFAULT_PORT, DEFAULT_SESSIONS = 8765, 64


def decides_what_runs(name: str) -> bool:
    """Return True if a variable can change the code that a program runs.

    Loaders, interpreters, shells and container runtimes read code, or its location, from such variables.
    """
    return name in _OF_THE_SYSTEM or _OF_LOADERS.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """Settings of a gateway. Raises UsageError for an address that other machines can reach without a key."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str | None = None
    """Key that clients must send. None: no key."""
    hosts: tuple[str, ...] = ()
    """Further host names by which clients reach the gateway."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may use the gateway."""
    no_key: bool = False
    """Require no key. Otherwise a key is created if none is given. Only on loopback."""
    variables: frozenset[str] = frozenset()
    """Variables that clients may set in the environment of a server's process."""
    image: str = ""
    """Image for sessions that name none."""
    sessions: int = DEFAULT_SESSIONS
    """Maximum number of running environments. More sessions wait."""
    queue_seconds: float = 120.0
    """Seconds that a session waits for a free slot before it is refused."""
    start_seconds: float = 60.0
    """Seconds that an environment may take to answer its first request."""
    idle_seconds: float = 600.0
    """Seconds without a request and without an open stream after which a session ends."""
    left_seconds: float = 60.0
    """Seconds after which a session ends whose client closed its stream and sent no request since.

    Such a client was probably killed.
    """
    session_seconds: float = 7200.0
    """Maximum lifetime of a session in seconds."""
    disk: int = 4 * 2**30
    """Maximum bytes of a session's files."""
    preload: bool = True
    """Fork sessions of a Python program from a process that has imported its libraries."""

    def __post_init__(self) -> None:
        for name in sorted(self.variables):
            if not _VARIABLE.fullmatch(name):
                raise UsageError(f"--variable {name} is no name of a variable: capitals, digits and _.")
            if decides_what_runs(name):
                raise UsageError(
                    f"--variable {name}: who sets that decides what code a program loads, so no client may."
                )
        if self.api_key is None and not is_loopback(self.host):
            raise UsageError(
                f"--host {self.host} is reachable from other machines, so a key is required: set "
                f"{API_KEY_VARIABLE}, in the environment or in the file .env. Clients send it as "
                "`Authorization: Bearer ...`."
            )


_MAX_VARIABLES = 100


class GatewayError(Exception):
    """A request that is answered with an error. `reason` is for programs, the message for people."""

    def __init__(self, status: int, reason: str, message: str, *, code: int = -32600) -> None:
        super().__init__(message)
        self.status, self.reason, self.code = status, reason, code
        self.data: dict[str, object] = {}


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Environment that a session requests: an image ("" if unnamed) and variables for its process."""

    image: str
    variables: tuple[tuple[str, str], ...]


def parse_variable_headers(headers: Iterable[str]) -> dict[str, str]:
    """Return the variables that request headers set in a server's process, each with its header."""
    ours = [header for header in headers if header.lower().startswith("env-")]
    return {header[4:].upper().replace("-", "_"): header for header in ours}


def read_launch_request(headers: Mapping[str, str], settings: GatewaySettings) -> LaunchRequest:
    """Return the environment that the headers of a request select.

    `Mcp-Image` names the image, else the default is used. `Env-Foo-Bar: v` sets FOO_BAR=v. Raises GatewayError 400
    for a header that names no variable, and 403 for a variable that clients may not set.
    """
    variables = {}
    for name, header in parse_variable_headers(headers).items():
        value = headers[header]
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise GatewayError(
                400, "variable", f"The header {header} stands for no variable: write Env-NAME."
            )
        if name not in settings.variables:
            raise GatewayError(
                403,
                "variable",
                f"Clients of this gateway may not set {name}. Name it where the gateway is started: "
                f"--variable {name}.",
            )
        variables[name] = value
    if len(variables) > _MAX_VARIABLES:
        raise GatewayError(
            400, "variable", f"{len(variables)} Env- headers; at most {_MAX_VARIABLES} are taken."
        )
    image = headers.get("mcp-image", "").strip() or settings.image
    return LaunchRequest(image, tuple(sorted(variables.items())))


def split_command(command: str) -> list[str]:
    """Split the value of `--command` into arguments. Raises UsageError for an unclosed quote."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--command: {error}: close what is open, or write \\ before it.") from None
