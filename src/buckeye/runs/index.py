"""Index of a run's rollouts: one row per rollout, without its texts, in `rollouts/index.sqlite`.

The index is made from the JSON Lines in `rollouts/` and `evals/`. It can be deleted at any time. If the file
cannot be written, the index is made in a temporary file.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec

from buckeye.monitor.rollouts import ROLLOUTS_FOLDER, current_evaluations, current_rollouts_files

log = logging.getLogger(__name__)

INDEX_FILE = "index.sqlite"
_VERSION = 4
_WAIT_SECONDS = 5.0  # for another reader that is writing the index
_FILES = "CREATE TABLE files (path TEXT PRIMARY KEY, step INT, size INT, changed INT, unreadable INT)"
_ROLLOUTS = (
    "CREATE TABLE rollouts (path TEXT, at INT, bytes INT, split TEXT, step INT, grp INT, number INT, "
    "env TEXT, task TEXT, dropped TEXT, reward REAL, shaped_reward REAL, advantage REAL, components TEXT, "
    "stop_reason TEXT, error TEXT, truncated INT, cut INT, retried INT, seconds REAL, sampling_seconds REAL, "
    "turns INT, segments INT, completion_tokens INT, oldest_version INT, prompt INT, text INT, echoes INT, "
    "ended REAL)"
)
_BY_STEP = "CREATE INDEX by_step ON rollouts (split, step, grp, number)"
_MADE = (_FILES, _ROLLOUTS, _BY_STEP)
_INSERT = f"INSERT INTO rollouts VALUES ({', '.join('?' * 29)})"  # noqa: S608  constant
_SHORTEST_ECHO = 2


class _Message(msgspec.Struct):
    role: str = ""
    content: msgspec.Raw = msgspec.Raw(b'""')


_Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Integer that SQLite stores."""


class _Line(msgspec.Struct):
    """Indexed fields of a line of a rollout file. Lines of evaluations lack some of them."""

    task_id: str
    group: _Integer = 0
    rollout: _Integer | None = None
    env: str = ""
    dropped: str | None = None
    reward: float | None = None
    shaped_reward: float | None = None
    advantages: list[float] | None = None
    components: dict[str, float] = {}
    stop_reason: str | None = None
    error: str | None = None
    truncated: bool = False
    cut: bool = False
    retried: bool = False
    seconds: float | None = None
    ended: float | None = None
    sampling_seconds: float | None = None
    turns: _Integer = 0
    completion_tokens: _Integer = 0
    oldest_version: _Integer | None = None
    text: list[str] = []
    messages: list[_Message] = []


_decode = msgspec.json.Decoder(_Line, strict=False).decode
_decode_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode


def open_index(run: Path) -> sqlite3.Connection:
    """Return the index of the run in a directory, updated with new files."""
    path = run / ROLLOUTS_FOLDER / INDEX_FILE
    try:
        if path.parent.is_dir():
            return _updated(sqlite3.connect(path, timeout=_WAIT_SECONDS), run)
    except sqlite3.DatabaseError as error:  # locked, damaged, or on a full or read-only disk
        log.debug("%s is not used: %s", path, error)
    return _updated(sqlite3.connect(""), run)  # a temporary file


def _updated(index: sqlite3.Connection, run: Path) -> sqlite3.Connection:
    try:
        index.execute("PRAGMA trusted_schema = OFF")
        index.execute("PRAGMA synchronous = NORMAL")
        if not _is_ours(index):
            _make(index)
        present = {str(path.relative_to(run)): (step, path) for step, path in _files_of(run)}
        known = {path: (size, changed) for path, size, changed in index.execute(_KNOWN)}
        new = {name: found for name, found in present.items() if _stamp(found[1]) != known.get(name)}
        deleted = _deleted_files(index, present)
        if new or deleted:
            with index:
                for name in (*deleted, *(name for name in new if name in known)):
                    index.execute("DELETE FROM rollouts WHERE path = ?", (name,))
                    index.execute("DELETE FROM files WHERE path = ?", (name,))
                for name, (step, path) in new.items():
                    _read(index, name, step, path)
    except BaseException:
        index.close()
        raise
    return index


_KNOWN = "SELECT path, size, changed FROM files"


def _is_ours(index: sqlite3.Connection) -> bool:
    """Return True if the database has exactly the tables of this version."""
    made = {sql for (sql,) in index.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    return made == set(_MADE) and index.execute("PRAGMA user_version").fetchone() == (_VERSION,)


def _make(index: sqlite3.Connection) -> None:
    with index:
        for kind, name in list(index.execute("SELECT type, name FROM sqlite_master WHERE sql IS NOT NULL")):
            quoted = name.replace('"', '""')
            index.execute(f'DROP {kind} IF EXISTS "{quoted}"')
        for sql in _MADE:
            index.execute(sql)
        index.execute(f"PRAGMA user_version = {_VERSION}")


def _files_of(run: Path) -> Iterator[tuple[int, Path]]:
    """Yield (step, path) of every rollout file, of training and evaluations, except abandoned ones."""
    yield from current_rollouts_files(run)
    yield from ((step, path) for step, path, _ in current_evaluations(run))


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        seen = path.stat()
    except FileNotFoundError:  # deleted in the meantime
        return None
    return seen.st_size, seen.st_mtime_ns


def _deleted_files(index: sqlite3.Connection, present: dict[str, tuple[int, Path]]) -> list[str]:
    """Return the indexed files that no longer exist, except files that the run deleted by age."""
    oldest = min((step for step, _ in present.values()), default=None)
    known = index.execute("SELECT path, step FROM files")
    return [path for path, step in known if path not in present and oldest is not None and step >= oldest]


def _read(index: sqlite3.Connection, name: str, step: int, path: Path) -> None:
    stamp, unreadable = _stamp(path), [0]
    if stamp is None:
        return
    index.executemany(_INSERT, _rows(name, step, path, unreadable))
    index.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?)", (name, step, *stamp, *unreadable))


def _rows(name: str, step: int, path: Path, unreadable: list[int]) -> Iterator[tuple[Any, ...]]:
    """Yield one row per line, and count invalid lines."""
    numbers: Counter[int] = Counter()
    groups: dict[str, int] = {}
    is_eval, at = path.parent.name != ROLLOUTS_FOLDER, 0
    with path.open("rb") as file:
        for line in file:
            begins, at = at, at + len(line)
            try:
                record = _decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                unreadable[0] += bool(line.strip())
                continue
            group = groups.setdefault(record.task_id, len(groups)) if is_eval else record.group
            number = record.rollout if record.rollout is not None else numbers[group]
            numbers[group] += not record.retried
            asked, reply = _prompt_and_reply(record)
            prompt = "\n".join(asked)
            yield (
                *(name, begins, len(line), "eval" if is_eval else "train", step, group, number),
                *(path.stem if is_eval else record.env, record.task_id, record.dropped, record.reward),
                *(record.shaped_reward, _mean(record.advantages), _encode(record.components).decode()),
                *(record.stop_reason, record.error, record.truncated, record.cut, record.retried),
                *(record.seconds, record.sampling_seconds),
                *(record.turns, len(record.text), record.completion_tokens, record.oldest_version),
                _hash(prompt) if _are_first(asked, record.text) else None,
                _hash("\0".join(record.text)) if record.text else None,
                *(_echoes(prompt, reply), record.ended),
            )


def _are_first(asked: list[str], texts: list[str]) -> bool:
    """Return True if `asked` is in the first text, and not in a later conversation of the rollout."""
    return len(texts) < 2 or not asked or "".join(asked[-1].split()) in "".join(texts[0].split())


def _prompt_and_reply(record: _Line) -> tuple[list[str], str]:
    """Return the texts before the first reply, and the last reply, or "" if the reply is not text."""
    before, reply, begun = list[str](), msgspec.Raw(), False
    for message in record.messages:
        if message.role == "assistant":
            begun, reply = True, message.content
        elif not begun:
            text = _text(message.content)
            before.append(bytes(message.content).decode(errors="replace") if text is None else text)
    return before, (_text(reply) or "").strip()


def _text(content: msgspec.Raw) -> str | None:
    with suppress(msgspec.DecodeError):
        return _decode_text(content)
    return None


def _echoes(prompt: str, reply: str) -> bool | None:
    """Return True if the prompt contains the whole reply; None if the reply is too short."""
    return reply in prompt if len(reply) >= _SHORTEST_ECHO and prompt else None


def _mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def _hash(text: str) -> int:
    """Return a 64-bit hash to find equal texts."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
