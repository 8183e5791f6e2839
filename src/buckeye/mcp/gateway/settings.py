"""How a gateway behaves."""

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
    """Whether a loader, an interpreter, a shell or a runtime of containers reads a variable, and takes code,
    or where code is, from it."""
    return name in _OF_THE_SYSTEM or _OF_LOADERS.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """Limits are counts and seconds. Raises UsageError for an address in reach of others without a key."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str | None = None
    """What clients must send; None asks for none."""
    hosts: tuple[str, ...] = ()
    """Further names that clients reach it by."""
    origins: tuple[str, ...] = ()
    """Web pages that may use it."""
    no_key: bool = False
    """Whether no key is asked for: else one is made where none is given. On loopback only."""
    variables: frozenset[str] = frozenset()
    """What clients may set in the environment of a server's process."""
    image: str = ""
    """For sessions that name none."""
    sessions: int = DEFAULT_SESSIONS
    """Environments that run at once; more sessions wait."""
    queue_seconds: float = 120.0
    """How long a session waits for its turn before it is refused."""
    start_seconds: float = 60.0
    """How long an environment may take to answer its first request."""
    idle_seconds: float = 600.0
    """A session without a request, and without an open stream, for so long is ended."""
    left_seconds: float = 60.0
    """A session whose client has closed its stream, and has asked nothing since, for so long is ended: the
    client was killed."""
    session_seconds: float = 7200.0
    """Longest life of a session."""
    disk: int = 4 * 2**30
    """Bytes that the files of a session may take."""
    preload: bool = True
    """Whether sessions of a Python program are forked from a process that has imported its libraries."""

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


def set_variables(headers: Iterable[str]) -> dict[str, str]:
    """The variables that headers for the gateway set in the process of a server, and by which header each."""
    ours = [header for header in headers if header.lower().startswith("env-")]
    return {header[4:].upper().replace("-", "_"): header for header in ours}


def read_wish(headers: Mapping[str, str], settings: GatewaySettings) -> Wish:
    """`Mcp-Image`, or else the default, and `Env-Foo-Bar: v` as FOO_BAR=v. Raises Refusal 400 for a header
    that names no variable, and 403 for a variable that clients may not set here."""
    variables = {}
    for name, header in set_variables(headers).items():
        value = headers[header]
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


def split_command(command: str) -> list[str]:
    """Return the words of `--command`. Raises UsageError for a quote that is not closed."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--command: {error}: close what is open, or write \\ before it.") from None
