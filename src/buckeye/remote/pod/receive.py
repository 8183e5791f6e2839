"""Receive a project: `python -m buckeye.remote.pod.receive FOLDER`.

1. The program reads the manifest from stdin, a line of JSON:
   `{"files": {path: sha256}, "links": {path: target}, "folders": [path]}`. `folders` are empty folders.
2. It reads a tar archive of the files from stdin.
3. It writes `{}` to stdout, in the format of `send`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from collections.abc import Container
from pathlib import Path
from typing import BinaryIO

from buckeye.base.storage import sha256_file, write_link


def receive(folder: Path, source: BinaryIO, answers: BinaryIO) -> None:
    """Write the files of the manifest to a folder. Raises ValueError if wrong content arrives."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = json.loads(source.readline())
    files: dict[str, str] = wanted["files"]
    links: dict[str, str] = wanted["links"]
    folders: list[str] = wanted["folders"]
    for name in (*files, *links, *folders):
        _check_name(name)
    _unpack(folder, source, files)
    wrong = [name for name, digest in files.items() if _digest(folder / name) != digest]
    if wrong:
        raise ValueError(f"{wrong[0]} is not what was sent ({len(wrong)} of {len(files)} files)")
    for name in folders:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, target in links.items():
        write_link(folder / name, target)
    send(answers, {})


def _check_name(name: str) -> None:
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r} is outside of the folder")


def _digest(path: Path) -> str | None:
    if path.is_symlink() or not path.is_file():
        return None
    return sha256_file(path) + ("x" if os.access(path, os.X_OK) and path.stat().st_mode & 0o100 else "")


def _unpack(folder: Path, source: BinaryIO, files: Container[str]) -> None:
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for member in archive:
            if member.name not in files or not member.isreg():
                raise ValueError(f"{member.name!r} is not in the manifest")
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
