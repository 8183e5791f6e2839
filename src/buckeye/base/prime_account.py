"""The account at Prime Intellect: API key, team, API URL, and ssh key file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from buckeye.base.keys import variables
from buckeye.base.storage import read_json
from buckeye.errors import UsageError

_DEFAULT_URL = "https://api.primeintellect.ai"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrimeAccount:
    """An account at Prime Intellect. `url` does not include `/api/v1`."""

    api_key: str = field(repr=False)
    url: str = _DEFAULT_URL
    team_id: str | None = None
    ssh_key_path: Path | None = None


def prime_account() -> PrimeAccount:
    """Return the account from PRIME_API_KEY, PRIME_API_BASE_URL, PRIME_TEAM_ID and PRIME_SSH_KEY_PATH.

    These variables come from the environment or `.env`. The default values come from `~/.prime/config.json`,
    the configuration of the program `prime`. Raises UsageError if no API key is found or a value is invalid.
    """
    known = variables()
    stored = _stored()
    key = known.get("PRIME_API_KEY") or stored.get("api_key")
    if not key:
        raise UsageError(
            "no key for Prime Intellect",
            code="BK-KEY-MISSING",
            hint="run `buckeye auth set PRIME_API_KEY`, or set it in .env or the environment. Create a key "
            "with the rights to read availability and to read and write instances at "
            "https://app.primeintellect.ai/dashboard/tokens",
        )
    url = known.get("PRIME_API_BASE_URL") or stored.get("base_url")
    return PrimeAccount(
        api_key=_one_line(key),
        url=_checked_url(url or _DEFAULT_URL),
        team_id=known.get("PRIME_TEAM_ID") or stored.get("team_id") or None,
        ssh_key_path=_ssh_key(known.get("PRIME_SSH_KEY_PATH"), stored.get("ssh_key_path")),
    )


def _ssh_key(asked: str | None, stored: str | None) -> Path | None:
    """Return the path of the private key that the user chose, or None.

    If the user chose no key, `prime` stores `~/.ssh/id_rsa`. This path is returned only if the file exists.
    """
    named = asked or stored
    if not named:
        return None
    path = Path(os.path.expanduser(named))
    unchosen = not asked and path == Path.home() / ".ssh" / "id_rsa"
    return None if unchosen and not path.is_file() else path


def _stored() -> dict[str, str]:
    path = Path.home() / ".prime" / "config.json"
    try:
        found: Any = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {path} ({type(error).__name__})",
            code="BK-FILE-UNREADABLE",
            hint="run `prime login` to write it again",
        ) from None
    if not isinstance(found, dict):
        raise UsageError(
            f"{path} is not a JSON object",
            code="BK-FILE-FORMAT",
            hint="run `prime login` to write it again",
        )
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _checked_url(text: str) -> str:
    url = text.rstrip("/").removesuffix("/api/v1")
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"PRIME_API_BASE_URL={text} is not a URL",
            code="BK-CONFIG-VALUE",
            hint=f"the default is {_DEFAULT_URL}",
        )
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise UsageError(
            f"PRIME_API_BASE_URL={text} would send the key unencrypted",
            code="BK-CONFIG-VALUE",
            hint="write https://",
        )
    return url


def _one_line(key: str) -> str:
    key = key.strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            "PRIME_API_KEY has invalid characters", code="BK-KEY-INVALID", hint="copy the key again"
        )
    return key
