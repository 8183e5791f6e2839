"""The way to another machine: one ssh connection, made again when it is lost."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buckeye.base.process import run_program
from buckeye.errors import RemoteError, UsageError
from buckeye.remote.base import SshTarget
from buckeye.remote.known_hosts import known_keys, record_key

if TYPE_CHECKING:
    import asyncssh


# Addresses for ssh, as users and providers write them.

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,31}")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.\-]{0,252}[A-Za-z0-9])?")
_ADDRESS6 = re.compile(r"[0-9A-Fa-f:.]{2,45}")
_PLACE = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<six>[^\]]+)\]|(?P<host>[^\[\]:\s]+))(?::(?P<port>\d+))?"
)


def parse_target(text: str, *, user: str = "root") -> SshTarget:
    """Read `[user@]host[:port]`, or a line such as `ssh root@1.2.3.4 -p 1234`, whose `-p` goes first. An
    address of IPv6 is written in brackets. Raises ValueError for anything that is no plain address: these
    words become arguments of programs."""
    words = shlex.split(text)
    if words[:1] == ["ssh"]:
        words = words[1:]
    port: str | None = None
    places = []
    while words:
        word = words.pop(0)
        if word == "-p":
            port = words.pop(0) if words else ""
        elif word.startswith("-p"):
            port = word[2:]
        else:
            places.append(word)
    if len(places) != 1:
        raise ValueError(f"expected user@host and a port, not {text!r}")
    match = _PLACE.fullmatch(places[0])
    if match is None:
        raise ValueError(f"{places[0]!r} is not [user@]host[:port]")
    return SshTarget(
        user=_checked(_USER, match["user"] or user, "user name"),
        host=_checked(_ADDRESS6 if match["six"] else _HOST, match["six"] or match["host"], "host"),
        port=_port(port if port is not None else match["port"] or "22"),
    )


def _checked(pattern: re.Pattern[str], word: str, what: str) -> str:
    if pattern.fullmatch(word) is None:
        raise ValueError(f"{word!r} is no {what}")
    return word


def _port(word: str) -> int:
    if not (word.isascii() and word.isdecimal() and 1 <= int(word) <= 65535):
        raise ValueError(f"{word!r} is no port")
    return int(word)


# Which private key opens a pod, and the public one that belongs to it.

_SECONDS = 20.0
_CHOSEN = "the ssh key of the account (PRIME_SSH_KEY_PATH, or `prime config set-ssh-key-path FILE`)"


def private_key(asked: Path | None, account: Path | None, home: Path) -> Path:
    """The key that was asked for, else the account's, else `~/.ssh/prime_key.pem`, else one that is made in
    `home`/ssh and used from then on. Raises UsageError if what is named is not there."""
    for path, where in ((asked, "--identity-file"), (account, _CHOSEN)):
        if path is None:
            continue
        if not path.expanduser().is_file():
            raise UsageError(f"{where}: there is no file {path}.")
        return path.expanduser()
    usual = Path.home() / ".ssh" / "prime_key.pem"
    return usual if usual.is_file() else _made(home / "ssh" / "id_ed25519")


def public_key(path: Path) -> str | None:
    """The line of `authorized_keys` that lets the owner of a private key in; None if it cannot be had, as
    that of a key under a passphrase without its `.pub` file."""
    beside = path.with_name(f"{path.name}.pub")
    if beside.is_file():
        return beside.read_text(encoding="utf-8", errors="replace").strip() or None
    try:
        done = run_program(["ssh-keygen", "-y", "-P", "", "-f", str(path)], seconds=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _made(path: Path) -> Path:
    """A key without a passphrase, which only this user can read."""
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "buckeye", "-f", str(temporary)]
    try:
        done = run_program(argv, seconds=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RemoteError(
            f"ssh-keygen cannot be run ({error}). Install OpenSSH, or name a key with --identity-file."
        ) from None
    if done.returncode != 0:
        raise RemoteError(f"ssh-keygen failed: {done.stderr.strip()}")
    temporary.with_name(f"{temporary.name}.pub").replace(path.with_name(f"{path.name}.pub"))
    temporary.replace(path)
    return path


_CONNECT_SECONDS = 20.0
_KEEPALIVE_SECONDS, _KEEPALIVES = 5.0, 3  # a silent peer is given up after their product
_SESSIONS = 8  # servers allow ten on a connection
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
_TELL_SECONDS = 5.0
_SELDOM_SECONDS = 60.0
_CLOSE_SECONDS = 2.0
_OPEN_ATTEMPTS, _OPEN_PAUSE = 10, 0.3


class LostConnectionError(RemoteError):
    """The connection was cut, or could not be made. What was asked for may have been done, or not."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a program there."""

    code: int
    stdout: bytes
    stderr: bytes

    def text(self) -> str:
        """Its last words, for a message."""
        lines = (self.stderr or self.stdout).decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-20:]) or "it said nothing"


def check_identity(path: Path) -> None:
    """Raise UsageError for a private key that is not there, or that others may read, which ssh refuses."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UsageError(f"--identity-file {path}: {error.strerror}.") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"--identity-file {path}: others may read this key. Type: chmod 600 {path}")


async def _opened(connection: Any, command: str) -> Any:
    """A program on a connection. A server that has a session too many for a moment is asked again."""
    import asyncssh

    for attempt in range(_OPEN_ATTEMPTS):
        try:
            return await connection.create_process(command, encoding=None)
        except asyncssh.ChannelOpenError:
            if connection.is_closed() or attempt + 1 == _OPEN_ATTEMPTS:
                raise
            await asyncio.sleep(_OPEN_PAUSE)
    raise AssertionError


class Link:
    """A machine and the connection to it. `own_settings` reads ~/.ssh/config, as ssh does, for hosts of the
    user; pods are strangers. `alive` is called between attempts, and raises if none can succeed."""

    def __init__(
        self,
        target: SshTarget,
        *,
        known_hosts: Path,
        identity_file: Path | None,
        own_settings: bool,
        tell: Callable[[str], None],
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        if identity_file is not None:
            check_identity(identity_file)
        self.target = target
        self._known_hosts, self._identity = known_hosts, identity_file
        self._own_settings, self._tell, self._alive = own_settings, tell, alive
        self._connection: asyncssh.SSHClientConnection | None = None
        self._making = asyncio.Lock()
        self._sessions = asyncio.Semaphore(_SESSIONS)

    async def connect(self, *, patience: float) -> None:
        """Have a connection; try for at most `patience` seconds. Raises LostConnectionError when they are
        over, RemoteError for what no further attempt can change."""
        async with self._making:
            started = told = time.monotonic()
            pause, apart = _FIRST_PAUSE, _TELL_SECONDS
            while self._connection is None or self._connection.is_closed():
                try:
                    self._connection = await self._connect()
                    return
                except LostConnectionError as error:
                    now = time.monotonic()
                    if now - started > patience:
                        raise
                    if now - told > apart:
                        self._tell(
                            f"Still no connection to {self.target} after {now - started:.0f} s: {error}"
                        )
                        told, apart = now, min(2 * apart, _SELDOM_SECONDS)
                await asyncio.to_thread(self._alive)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def run(self, argv: Sequence[str], *, data: bytes = b"", seconds: float = 60.0) -> Finished:
        """Run a program to its end. Raises LostConnectionError if it was cut, RemoteError after `seconds`."""
        async with self.program(argv) as process:
            try:
                with suppress(BrokenPipeError):  # a program may end without reading
                    process.stdin.write(data)
                    process.stdin.write_eof()
                async with asyncio.timeout(seconds):
                    stdout, stderr = await asyncio.gather(process.stdout.read(), process.stderr.read())
                    await process.wait_closed()
            except (BrokenPipeError, ConnectionError) as error:
                raise self._lost(error) from None
            except TimeoutError:
                raise RemoteError(f"{argv[0]} on {self.target} has not ended in {seconds:.0f} s.") from None
            if process.exit_status is None:  # also what a cut connection looks like; nothing is raised then
                raise LostConnectionError(f"The connection to {self.target} was cut.")
            return Finished(process.exit_status, stdout, stderr)

    @asynccontextmanager
    async def program(self, argv: Sequence[str]) -> AsyncIterator[asyncssh.SSHClientProcess[bytes]]:
        """A program whose input and output are bytes. It may live on when the context ends."""
        import asyncssh

        connection = self._connection
        if connection is None:
            raise LostConnectionError(f"There is no connection to {self.target}.")
        async with self._sessions:
            try:
                process: Any = await _opened(connection, shlex.join(argv))
            except (asyncssh.Error, OSError) as error:
                connection.abort()
                raise self._lost(error) from None
            try:
                yield process
            except (asyncssh.Error, ConnectionError) as error:
                raise self._lost(error) from None
            finally:
                process.close()
                with suppress(asyncssh.Error, OSError, TimeoutError):
                    async with asyncio.timeout(_CLOSE_SECONDS):
                        await process.wait_closed()  # until then the server counts it

    async def close(self) -> None:
        """End the connection; what runs there goes on."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    def cut(self) -> None:
        """Give up a connection that does not answer."""
        if self._connection is not None:
            self._connection.abort()

    async def _connect(self) -> asyncssh.SSHClientConnection:
        import asyncssh

        met = known_keys(self._known_hosts, self.target)
        first: list[str] = []

        class Client(asyncssh.SSHClient):
            def validate_host_public_key(self, host: str, addr: str, port: int, key: Any) -> bool:
                if met:
                    return False  # asked for every key that is not known, a changed one too
                first.append(" ".join(key.export_public_key().decode().split()[:2]))
                return True

        trusted = [asyncssh.import_public_key(key) for key in met]
        settings: dict[str, Any] = {} if self._own_settings else {"config": None, "agent_path": None}
        if self._identity is not None:
            settings["client_keys"] = [str(self._identity)]
        try:
            connection = await asyncssh.connect(
                self.target.host,
                self.target.port,
                username=self.target.user,
                known_hosts=lambda _host, _address, _port: (trusted, [], []),
                client_factory=Client,
                keepalive_interval=_KEEPALIVE_SECONDS,
                keepalive_count_max=_KEEPALIVES,
                connect_timeout=_CONNECT_SECONDS,
                login_timeout=_CONNECT_SECONDS,
                **settings,
            )
        except asyncssh.HostKeyNotVerifiable:
            raise RemoteError(
                f"{self.target} shows another key than before: this may be another machine. If it was "
                f"installed again, delete its line from {self._known_hosts}."
            ) from None
        except asyncssh.PermissionDenied as error:
            key = self._identity or "the keys of ssh"
            raise RemoteError(
                f"{self.target} does not let us in ({error.reason}) with {key}. Name another key with "
                "--identity-file."
            ) from None
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
            raise UsageError(f"--identity-file {self._identity} cannot be used: {error}.") from None
        except (asyncssh.Error, OSError, TimeoutError) as error:
            raise self._lost(error) from None
        if first:
            record_key(self._known_hosts, self.target, first[0])
        return connection

    def _lost(self, error: BaseException) -> LostConnectionError:
        return LostConnectionError(f"No connection to {self.target}: {str(error) or type(error).__name__}.")
