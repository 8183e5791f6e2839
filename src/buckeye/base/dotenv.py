"""Read `.env` files, which hold keys and other variables of a project outside of its repository."""

from __future__ import annotations

import re
from pathlib import Path

from buckeye.errors import UsageError

LINE = re.compile(
    r"""\s*(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)\s*=[ \t]*
    (?:'(?P<raw>[^']*)'|"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>(?!['"])(?:[^#\s]|[ \t]+[^#\s]|(?<=\S)\#)*))
    [ \t]*(?:\#.*)?""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def read_dotenv(path: Path) -> dict[str, str]:
    """Return the variables in a file with lines `NAME=value`, or {} if the file does not exist.

    `export` before a name, quotes around a value and comments are allowed. References such as `$NAME` are not
    expanded. Raise `UsageError` for an invalid line. The error has the line number, but not the content of
    the line, which may be a secret.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read {path}: {reason}", code="BK-FILE-UNREADABLE") from None
    values = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise UsageError(
                "expected a line NAME=value",
                code="BK-FILE-FORMAT",
                at=f"{path}:{number}",
                hint="put quotes around a value that has quotes",
            )
        values[match["name"]] = _parse_value(match)
    return values


def _parse_value(match: re.Match[str]) -> str:
    if match["quoted"] is not None:
        return re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), match["quoted"])
    return match["raw"] if match["raw"] is not None else match["bare"]
