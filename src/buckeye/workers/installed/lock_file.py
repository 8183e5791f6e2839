"""Lock file of an environment: the exact versions of its packages, in the format of a requirements file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

from buckeye.errors import UsageError

_PIN = re.compile(r"([A-Za-z0-9][\w.-]*)==([^\s;\\]+)")
_UNMANAGED = ("pip", "setuptools", "wheel")

Report = Callable[[str], None]
"""Function that shows one line of progress."""


@dataclass(frozen=True, slots=True)
class LockFile:
    """Content of a lock file. `pins` maps canonical names to versions, `text` is the whole file."""

    pins: Mapping[str, str]
    text: str

    def without(self, name: str) -> str:
        """Return the text of the file without the distribution `name`."""
        kept = [entry for entry in _entries(self.text) if _name_of(entry) != name]
        return "\n".join(kept) + "\n"


def pins_of(distributions: Sequence[metadata.Distribution]) -> list[str]:
    """Return NAME==VERSION for each distribution, except tools of the virtual environment."""
    names = {canonicalize_name(d.name): d.version for d in distributions}
    return [f"{name}=={version}" for name, version in sorted(names.items()) if name not in _UNMANAGED]


def lock_text(
    pins: Sequence[str], hashes: Mapping[str, Sequence[str]], *, local: str | None, head: str
) -> str:
    """Return the content of a lock file.

    `head` becomes the first comment. `local` is a package that no index provides; only a comment
    names it. The file has hashes for all packages or for none, because pip requires all hashes if a file has
    one.
    """
    locked = [pin for pin in pins if _name_of(pin) != local]
    are_all_hashed = all(hashes.get(str(_name_of(pin))) for pin in locked)
    lines = [f"# {head}"]
    if local is not None:
        lines.append(f"# {next(pin for pin in pins if _name_of(pin) == local)} is installed from its source")
    for pin in locked:
        pin_hashes = hashes[str(_name_of(pin))] if are_all_hashed else ()
        lines.append(" \\\n    ".join([pin, *(f"--hash={value}" for value in pin_hashes)]))
    return "\n".join(lines) + "\n"


def read_lock(path: Path) -> LockFile:
    """Read a lock file. Raises UsageError if it is invalid."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--locked: cannot read {path}: {error}", code="BK-FILE-UNREADABLE") from None
    pins: dict[str, str] = {}
    for number, entry in enumerate(_entries(text), start=1):
        match = _PIN.match(entry)
        if match is None:
            raise UsageError(
                f"--locked: entry {number} of {path} is {entry[:60]!r}, expected NAME==VERSION",
                code="BK-FILE-FORMAT",
                hint="pass the requirements.lock of an installed environment",
            )
        pins[canonicalize_name(match[1])] = match[2]
    return LockFile(pins, text)


def _entries(text: str) -> list[str]:
    """Return one line per requirement, without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [entry for entry in "\n".join(lines).replace("\\\n", " ").splitlines() if entry.strip()]


def _name_of(entry: str) -> str | None:
    match = _PIN.match(entry)
    return canonicalize_name(match[1]) if match else None
