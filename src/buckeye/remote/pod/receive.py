"""Receive a project: `python -m buckeye.remote.pod.receive FOLDER`.

1. The program reads the manifest from stdin, a line of JSON:
   `{"files": {path: sha256}, "links": {path: target}, "folders": [path]}`. `folders` are empty folders.
2. It writes `{"needed": paths}` to stdout: the files that are missing or different.
3. It reads a tar archive of these files from stdin.
4. It writes the counts `{"received", "removed"}` to stdout.

`send` defines the format of the output. The program deletes files of an earlier manifest that the new
manifest lacks. It does not change files that a run wrote.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import BinaryIO

from buckeye.base.storage import sha256_file, write_file, write_link

_RECORD = ".buckeye-manifest.json"


def receive(folder: Path, source: BinaryIO, answers: BinaryIO) -> None:
    """Make the files of a folder equal to the manifest. Raises ValueError if wrong content arrives."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = json.loads(source.readline())
    files: dict[str, str] = wanted["files"]
    links: dict[str, str] = wanted["links"]
    folders: list[str] = wanted["folders"]
    for name in (*files, *links, *folders):
        _check_name(name)
    needed = [name for name, digest in files.items() if _digest(folder / name) != digest]
    send(answers, {"needed": needed})
    removed = _remove_others(folder, {*files, *links})
    _unpack(folder, source, set(needed))
    wrong = [name for name in needed if _digest(folder / name) != files[name]]
    if wrong:
        raise ValueError(f"{wrong[0]} is not what was sent ({len(wrong)} of {len(needed)} files)")
    for name in folders:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, target in links.items():
        write_link(folder / name, target)
    write_file(folder / _RECORD, json.dumps(sorted({*files, *links})))
    send(answers, {"received": len(needed), "removed": removed})


def _check_name(name: str) -> None:
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r} is outside of the folder")


def _digest(path: Path) -> str | None:
    if path.is_symlink() or not path.is_file():
        return None
    return sha256_file(path) + ("x" if os.access(path, os.X_OK) and path.stat().st_mode & 0o100 else "")


def _remove_others(folder: Path, wanted: set[str]) -> int:
    """Delete files of the earlier manifest that are not `wanted`, and return their number."""
    try:
        before = json.loads((folder / _RECORD).read_text())
    except (OSError, ValueError):
        return 0
    gone = [name for name in before if name not in wanted]
    for name in gone:
        _check_name(name)
        (folder / name).unlink(missing_ok=True)
    return len(gone)


def _unpack(folder: Path, source: BinaryIO, needed: set[str]) -> None:
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for member in archive:
            if member.name not in needed or not member.isreg():
                raise ValueError(f"{member.name!r} was not requested")
            target = folder / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.parent.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{member.name!r} is outside of the folder")
            content = archive.extractfile(member)
            assert content is not None
            temporary = target.with_name(f".{target.name}.part")
            with temporary.open("wb") as file:
                shutil.copyfileobj(content, file)
            temporary.chmod(0o755 if member.mode & 0o100 else 0o644)
            temporary.replace(target)


def send(answers: BinaryIO, value: object, content: bytes = b"") -> None:
    """Write a response: the lengths of JSON and bytes in 8 hexadecimal digits each, then JSON and bytes."""
    words = json.dumps(value).encode()
    answers.write(b"%08x%08x" % (len(words), len(content)) + words + content)
    answers.flush()


def main() -> int:
    """Receive a project on standard input; return the exit code."""
    try:
        receive(Path(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
    except (OSError, ValueError, KeyError, tarfile.TarError) as error:
        print(f"{sys.argv[1]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
