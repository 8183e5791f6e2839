"""The key that the nodes of a run share: in a file that only its user may read, or in the environment."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from buckeye.base.storage import write_file
from buckeye.errors import UsageError

KEY_VARIABLE = "BUCKEYE_CLUSTER_KEY"
"""The environment variable that may hold the key, where there is no file for it."""

KEY_FILE = "cluster.key"
"""The name of the file in the output directory."""

_LENGTH = 32


def read_key(path: Path) -> str:
    """The key in a file. Raises FileNotFoundError if it is not there (yet), UsageError if it cannot be read,
    is too short, or if others may read it."""
    try:
        mode = path.stat().st_mode
        key = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The key of the nodes cannot be read: {error}.") from None
    if mode & 0o077:
        raise UsageError(f"{path} holds a key and may be read by others: chmod 600 {path}")
    if len(key) < _LENGTH:
        raise UsageError(f"{path} holds no key: delete it, and the next start of the run makes another one.")
    return key


def key_for_run(path: Path) -> str:
    """The key of the environment, else that of the file, which is made if it is missing."""
    given = os.environ.pop(KEY_VARIABLE, "")
    if given:
        return given
    if not path.exists():
        write_file(path, secrets.token_urlsafe(_LENGTH) + "\n", mode=0o600)
    return read_key(path)
