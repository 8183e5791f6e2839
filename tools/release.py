"""Build wheel, source archive and list of components into dist/, check their content, and print their sizes.

On a commit with a tag, the tag must be v and the version in src/buckeye/version.py. Exit code 1 if a check
fails.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
UV = str(Path(sys.executable).with_name("uv"))
_UNWANTED = re.compile(r"(^|/)(tests|__pycache__|\.[^/]+_cache|\.cache|\.venv)/|\.pyc$|(^|/)\.env$")
_TEMPLATES = ("buckeye/envs/templates/", "environments/template/")  # a new environment begins with a test


def main() -> int:
    """Build and check; return the exit code."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([UV, "build", "--quiet", "--out-dir", str(DIST)], cwd=ROOT, check=True)
    components = DIST / "components.cdx.json"
    export = [UV, "export", "--quiet", "--frozen", "--no-dev", "--extra", "train", "--format", "cyclonedx1.5"]
    subprocess.run(
        [*export, "--output-file", str(components)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    (wheel,), (archive,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    problems = version_problems(wheel.name.split("-")[1])
    with zipfile.ZipFile(wheel) as opened:
        names, unpacked = opened.namelist(), sum(entry.file_size for entry in opened.infolist())
    with tarfile.open(archive) as opened_archive:
        members = [member for member in opened_archive if member.isfile()]
    sources = [member.name.partition("/")[2] for member in members]
    problems += [f"{wheel.name}: unwanted {name}" for name in unwanted(names)]
    problems += [f"{archive.name}: unwanted {name}" for name in unwanted(sources)]
    print(f"{wheel.name}: {len(names)} files, {size(wheel.stat().st_size)}, {size(unpacked)} unpacked")
    print(f"{archive.name}: {len(members)} files, {size(archive.stat().st_size)}")
    print(f"{components.name}: {components.read_text().count('pkg:pypi/')} packages with the extra train")
    for problem in problems:
        print(f"error: {problem}")
    return 1 if problems else 0


def unwanted(names: list[str]) -> list[str]:
    """Return the files that belong into neither archive: tests, caches, keys."""
    return [
        name
        for name in names
        if _UNWANTED.search(name) and not any(template in name for template in _TEMPLATES)
    ]


def version_problems(version: str) -> list[str]:
    """Return a problem for each tag of this commit that has another version."""
    done = subprocess.run(
        ["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    tags = [tag for tag in done.stdout.split() if re.match(r"v\d", tag)]
    return [f"the tag {tag} is not v{version}" for tag in tags if tag != f"v{version}"]


def size(count: int) -> str:
    """Return a number of bytes as text."""
    return f"{count / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
