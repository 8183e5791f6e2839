"""Addresses for ssh, as users and providers write them."""

from __future__ import annotations

import re
import shlex

from buckeye.remote.base import SshTarget

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
