"""Which private key opens a pod, and the public one that belongs to it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from buckeye.errors import RemoteError, UsageError
from buckeye.process import run_program

_SECONDS = 20.0


def private_key(asked: Path | None, account: Path | None, home: Path) -> Path:
    """The key that was asked for, else the account's, else `~/.ssh/prime_key.pem`, else one that is made in
    `home`/ssh and used from then on. Raises UsageError if what is named is not there."""
    for path, where in ((asked, "--identity-file"), (account, "the ssh key of the account")):
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
