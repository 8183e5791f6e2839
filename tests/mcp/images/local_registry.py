"""Debian's docker-registry on a free port, and images made without a base image."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.places import ROOT
from tests.ports import free_port
from tests.waiting import wait_for

TEXT_2048 = ROOT / "environments" / "text_2048"
NEEDED = ("docker-registry", "buildah", "ldd")

needs_registry = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(name) is None for name in NEEDED),
    reason="needs root on Linux and: apt-get install docker-registry buildah",
)


def python_tree(tree, project=TEXT_2048):
    """Create a root file system with this Python and a project, as a Dockerfile with a base image would."""
    prefix, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    home = tree / str(prefix).lstrip("/")
    unused = shutil.ignore_patterns(
        "test", "tests", "idlelib", "ensurepip", "site-packages", "__pycache__", "*.a"
    )
    shutil.copytree(prefix / "lib" / version, home / "lib" / version, ignore=unused)
    (home / "bin").mkdir(parents=True)
    shutil.copy2(prefix / "bin" / version, home / "bin" / version)
    site = tree / "app" / "site"
    words = ["--quiet", "--disable-pip-version-check", "--target", str(site), str(project)]
    subprocess.run([sys.executable, "-m", "pip", "install", *words], check=True)
    for library in needed_libraries([home / "bin" / version, *tree.rglob("*.so*")]):
        to = tree / str(library).lstrip("/")
        if not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library.resolve(), to)
    (tree / "tmp").mkdir(mode=0o777)
    (tree / "server").symlink_to(home.relative_to(tree) / "bin" / version)
    return tree


def needed_libraries(files):
    found = set()
    for file in files:
        listed = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=False).stdout
        found |= {Path(path) for path in re.findall(r"(/\S+) \(0x", listed)}
    return found


def python_dockerfile(folder, module):
    """Write a Dockerfile for the folder's `tree` (see `python_tree`) that runs a module."""
    home = str(Path(sys.base_prefix))
    (folder / "Dockerfile").write_text(
        "FROM scratch\nCOPY tree /\n"
        f"ENV PYTHONHOME={home} PYTHONPATH=/app/site\nWORKDIR /app\nUSER nobody\n"
        f'ENTRYPOINT ["/server", "-m", "{module}"]\n'
    )


def builder_environment(folder):
    """Return variables that make buildah keep all its files in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    storage = f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/root"\nrunroot = "{folder}/run"\n'
    (folder / "storage.conf").write_text(storage)
    return {"CONTAINERS_STORAGE_CONF": str(folder / "storage.conf")}


@contextmanager
def registry(folder, **settings):
    """Run a registry and yield its host and port; `settings` extend its configuration."""
    host = f"127.0.0.1:{free_port()}"
    folder.mkdir()
    storage = {"filesystem": {"rootdirectory": str(folder / "data")}}
    described = {"version": 0.1, "storage": storage, "http": {"addr": host}, "log": {"level": "warn"}}
    (folder / "config.yml").write_text(json.dumps(described | settings))
    with (folder / "log").open("w") as log:
        command = ["docker-registry", "serve", str(folder / "config.yml")]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: answers(f"http://{host}/v2/"), "no registry", (folder / "log").read_text)
        yield host
    finally:
        process.kill()
        process.wait()


def answers(url):
    try:
        return httpx.get(url).status_code in (200, 401)
    except httpx.HTTPError:
        return False
