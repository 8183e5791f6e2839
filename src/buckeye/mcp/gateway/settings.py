"""Settings of a gateway, and the request headers that select a session's environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from buckeye.base.request_gate import is_loopback
from buckeye.errors import UsageError

API_KEY_VARIABLE = "BUCKEYE_API_KEY"
_VARIABLE_NAME = re.compile(r"[A-Z_][A-Z0-9_]*", re.ASCII)
_LOADER_VARIABLES = re.compile(
    r"(LD|DYLD|PYTHON|PERL|RUBY|JAVA|JDK|NODE|NPM|PIP|UV|GIT|BASH|DOTNET|COR|CORECLR|LUA|PHP|R|GCONV|MALLOC|GLIBC)_"
    r".*|PYTHON.*|PERL.*|RUBY.*|_?JAVA_.*|NODE_.*|DOCKER_.*|CONTAINER.*|APPTAINER.*|SINGULARITY.*|BUCKEYE_.*"
    r"|(XDG|BUILDKIT|PODMAN|REGISTRY_AUTH|SSL_CERT)_.*|GODEBUG|(HTTPS?|NO|ALL)_PROXY"
)
_SYSTEM_VARIABLES = {
    "BASH_ENV", "CDPATH", "CLASSPATH", "EDITOR", "ENV", "GLOBIGNORE", "HOME", "HOSTALIASES", "IFS", "LOCPATH",
    "LOGNAME", "NLSPATH", "PAGER", "PATH", "PROMPT_COMMAND", "PS4", "PWD", "RES_OPTIONS", "SHELL",
    "SHELLOPTS", "TMPDIR", "USER", "VISUAL",
}  # fmt: skip
DEFAULT_PORT, DEFAULT_SESSIONS = 8765, 64
_MAX_VARIABLES = 100


def decides_what_runs(name: str) -> bool:
    """Return True if an environment variable can change the code that a program runs.

    Loaders, interpreters, shells, container programs and HTTP clients read code, or the location of code,
    from such variables.
    """
    return name in _SYSTEM_VARIABLES or _LOADER_VARIABLES.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """Settings of a gateway. Raises UsageError if other machines could reach the gateway without a key."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str | None = None
    """Key that clients must send. None: create a key, unless `no_key` is True."""
    hosts: tuple[str, ...] = ()
    """Additional host names in the URLs of clients."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may send requests to the gateway, such as `https://example.com`."""
    no_key: bool = False
    """Accept clients without a key. Only possible on a loopback address."""
    variables: frozenset[str] = frozenset()
    """Variables that clients may set in the environment of a server's process."""
    image: str = ""
    """Image for sessions that do not name an image."""
    sessions: int = DEFAULT_SESSIONS
    """Maximum number of running environments. Further sessions wait."""
    queue_seconds: float = 120.0
    """Seconds that a new session waits for a free slot. Then the gateway refuses it."""
    start_seconds: float = 60.0
    """Seconds that an environment may take to reply to its first request."""
    idle_seconds: float = 600.0
    """Seconds without a request and without an open stream after which a session ends."""
    left_seconds: float = 60.0
    """Seconds after which a session ends if its client has closed the stream and sends no more requests.

    A client that closes the stream without ending its session was probably killed.
    """
    session_seconds: float = 7200.0
    """Maximum lifetime of a session in seconds."""
    disk: int = 4 * 2**30
    """Maximum size of a session's files in bytes."""
    preload: bool = True
    """Fork sessions of a Python program from a process that has imported its libraries."""

    def __post_init__(self) -> None:
        for name in sorted(self.variables):
            if not _VARIABLE_NAME.fullmatch(name):
                hint = "use capital letters, digits and `_`"
                raise _argument_error(f"invalid variable name {name!r}", hint, at="--variable")
            if decides_what_runs(name):
                problem = f"clients may not set {name}, which can change the code that a program runs"
                raise _argument_error(problem, f"remove {name}", at="--variable")
        if self.api_key is None and not is_loopback(self.host):
            raise UsageError(
                f"a key is required: other machines can reach {self.host}",
                code="BK-KEY-MISSING",
                at="--host",
                hint=f"set `{API_KEY_VARIABLE}` in the environment or in `.env`, and let clients send "
                "`Authorization: Bearer ...` with this key",
            )


class GatewayError(Exception):
    """Error reply to a request. Programs read the code word `reason`, and people read the message."""

    def __init__(self, status: int, reason: str, message: str, *, code: int = -32600) -> None:
        super().__init__(message)
        self.status, self.reason, self.code = status, reason, code
        self.data: dict[str, object] = {}


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Environment that a session requests: an image ("" for the default) and variables for its process."""

    image: str
    variables: tuple[tuple[str, str], ...]


def parse_variable_headers(headers: Iterable[str]) -> dict[str, str]:
    """Return a mapping from each environment variable that a header sets to the name of the header."""
    env_headers = [header for header in headers if header.lower().startswith("env-")]
    return {header[4:].upper().replace("-", "_"): header for header in env_headers}


def read_launch_request(headers: Mapping[str, str], settings: GatewaySettings) -> LaunchRequest:
    """Return the environment that the headers of a request select.

    `Mcp-Image` names the image. Without this header, use the default image. `Env-Foo-Bar: v` sets the
    variable FOO_BAR to v. Raises GatewayError 400 for an invalid variable name, and 403 for a variable that
    clients may not set.
    """
    variables = {}
    for name, header in parse_variable_headers(headers).items():
        value = headers[header]
        if not _VARIABLE_NAME.fullmatch(name) or "\0" in value:
            raise GatewayError(400, "variable", f"The header {header} is not a variable: write `Env-NAME`")
        if name not in settings.variables:
            remedy = "" if decides_what_runs(name) else f": start the gateway with `--variable {name}`"
            message = f"Clients may not set {name}{remedy}"
            raise GatewayError(403, "variable", message)
        variables[name] = value
    if len(variables) > _MAX_VARIABLES:
        message = f"Too many `Env-` headers: {len(variables)}; the maximum is {_MAX_VARIABLES}"
        raise GatewayError(400, "variable", message)
    image = headers.get("mcp-image", "").strip() or settings.image
    return LaunchRequest(image, tuple(sorted(variables.items())))


def split_command(command: str) -> list[str]:
    """Split the value of `--command` into arguments. Raises UsageError for an unclosed quote."""
    try:
        return shlex.split(command)
    except ValueError as error:
        hint = "close the quote, or write `\\` before it"
        raise _argument_error(f"invalid quotes: {error}", hint, at="--command") from None


def _argument_error(message: str, hint: str, *, at: str) -> UsageError:
    return UsageError(message, code="BK-CLI-ARGUMENT", at=at, hint=hint)
