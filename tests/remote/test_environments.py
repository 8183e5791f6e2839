"""Environments of a run that a remote machine must install."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from buckeye.config.environments import EnvConfig
from buckeye.errors import UsageError
from buckeye.remote.bootstrap import bootstrap, setup_steps
from buckeye.remote.connection import SshConnection
from buckeye.remote.environments import NeededEnvironment, build_wheel, needed_environments
from buckeye.workers.installed.install import InstallRequest, install_environment
from tests.remote.sshd import needs_sshd, sshd
from tests.workers.installed.package_index import wheel

OURS = "[buckeye.environments]\nletters-env = letters_env:load_environment\n"


def unpacked(folder, name, **given):
    """Return a distribution as an installer leaves it, with caches and metadata files."""
    archive = wheel(folder, name, **given)
    site = folder / "site"
    with zipfile.ZipFile(archive) as file:
        file.extractall(site)
    (found,) = metadata.distributions(path=[str(site)], name=name)
    return found, site


def needed(*ids, **given):
    return needed_environments([EnvConfig(id=one, **given) for one in ids])


@pytest.fixture
def nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("BUCKEYE_ENVIRONMENTS", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.e2e
def test_a_wheel_has_the_files_as_they_are_here_and_no_others(tmp_path):
    found, site = unpacked(tmp_path, "my-env", files={"my_env.py": "X = 1\n"}, requires=["httpx>=0.1"])
    (site / "my_env.py").write_text("X = 2  # edited here\n")
    info = site / "my_env-1.0.dist-info"
    (info / "direct_url.json").write_text('{"url": "file:///x", "archive_info": {}}')
    name, packed = build_wheel(found)
    assert name == "my_env-1.0-py3-none-any.whl"
    assert build_wheel(found) == (name, packed)
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert archive.read("my_env.py") == b"X = 2  # edited here\n"
        record = archive.read("my_env-1.0.dist-info/RECORD").decode().splitlines()
        assert sorted(line.partition(",")[0] for line in record) == sorted(archive.namelist())
    (tmp_path / name).write_bytes(packed)
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path / "there"]
    subprocess.run([*words, tmp_path / name], check=True)
    assert (tmp_path / "there/my_env.py").read_text() == "X = 2  # edited here\n"


def test_what_has_parts_for_one_kind_of_machine_is_no_wheel(tmp_path):
    found, site = unpacked(tmp_path, "fast-env")
    text = site / "fast_env-1.0.dist-info/WHEEL"
    text.write_text(text.read_text().replace("true", "false"))
    assert build_wheel(found) is None


def test_what_is_in_the_project_or_in_buckeye_is_not_installed(tmp_path, nothing_installed):
    (tmp_path / "env.py").write_text("")
    (tmp_path / "own").mkdir()
    assert (
        needed(
            "env.py", "own", "./own", "agent", "dataset", "mcp", "buckeye-vf-gym", "buckeye/buckeye-vf-gym@1"
        )
        == ()
    )
    assert needed("someone/other", python="venv/bin/python") == ()


def test_what_is_only_on_the_hub_is_installed_from_it(nothing_installed):
    found = needed("someone/other@0.2", "someone/other@0.2", "reasoning-gym/chain_sum", "reasoning-gym/dice")
    assert found == (NeededEnvironment(what="someone/other@0.2"), NeededEnvironment(what="reasoning-gym"))


def test_a_name_that_nobody_could_find_is_refused(nothing_installed, refusal):
    with refusal(UsageError):
        needed("letters-env")


def test_what_buckeye_imports_here_travels_beside_it(tmp_path, nothing_installed, monkeypatch):
    _, site = unpacked(tmp_path, "letters-env", files={"letters_env.py": "A = 1"}, entry_points=OURS)
    monkeypatch.syspath_prepend(str(site))
    (found,) = needed("me/letters-env")
    assert (found.what, found.in_buckeye_venv, found.lock) == ("letters_env-1.0-py3-none-any.whl", True, None)


FAKE = r"""#!/bin/sh
case "$*" in
  *purelib*) case "$0" in /*) echo "$HOME/layers" ;; *) echo "$HOME/new" ;; esac ;;
  *-m\ venv*) mkdir -p venv/bin; cp "$0" venv/bin/python ;;
  *--locked\ 1.lock*) echo "$@" >> "$HOME/asked"; exit 1 ;;
  *) echo "$@" >> "$HOME/asked" ;;
esac
"""


def test_locked_versions_that_cannot_be_had_give_way_to_the_newest(tmp_path, wording):
    """The lock of the second of three environments cannot be satisfied."""
    needs = [
        NeededEnvironment(what="a-1.0-py3-none-any.whl", wheel=b"a", lock=b"x==1"),
        NeededEnvironment(what="b-1.0-py3-none-any.whl", wheel=b"b", lock=b"x==2"),
        NeededEnvironment(what="c-1.0-py3-none-any.whl", wheel=b"c", in_buckeye_venv=True),
    ]
    step = setup_steps(needs)[-1]
    (venv,) = set(re.findall(r"venv-\w+", step.script))
    python = tmp_path / f"software/{venv}/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE)
    python.chmod(0o755)
    for name in ("uv", "uvx"):
        python.with_name(name).write_text("")
    for name in ("layers", "new"):
        (tmp_path / name).mkdir()
    (tmp_path / "layers/buckeye-layers.pth").write_text("here")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "BUCKEYE_HOME": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-c", step.text()], input=step.data, env=environment, capture_output=True, check=False
    )
    install = "-m buckeye env install --no-smoke"
    assert (tmp_path / "asked").read_text().splitlines() == [
        f"{install} ./a-1.0-py3-none-any.whl --locked 0.lock",
        f"{install} ./b-1.0-py3-none-any.whl --locked 1.lock",
        f"{install} ./b-1.0-py3-none-any.whl",
        "-m pip install --quiet --disable-pip-version-check ./c-1.0-py3-none-any.whl",
    ], done.stderr
    assert done.stderr.decode() == wording
    assert (tmp_path / "new/buckeye-layers.pth").read_text() == "here"
    (programs,) = tmp_path.glob("software/environments-*/venv/bin")
    assert {path.name for path in programs.iterdir()} == {"python", "uv", "uvx"}


@needs_sshd
@pytest.mark.e2e
@pytest.mark.slow
def test_an_environment_in_an_interpreter_of_its_own_is_the_same_there(tmp_path, monkeypatch):
    """Version, code and lock are equal: its dependency is 1.0 here, and the index now has a newer one."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "letters-dep", "1.0", files={"letters_dep.py": "PRICE = 1"})
    files = {"letters_env.py": "import letters_dep\n"}
    wheel(wheels, "letters-env", files=files, requires=["letters-dep"], entry_points=OURS)
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(wheels))
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("BUCKEYE_ENVIRONMENTS", str(tmp_path / "here"))
    monkeypatch.chdir(tmp_path)
    request = InstallRequest(what=str(wheels / "letters_env-1.0-py3-none-any.whl"))
    install_environment(request, report=lambda _: None)
    wheel(wheels, "letters-dep", "1.1", files={"letters_dep.py": "PRICE = 2"})
    (wheels / "letters_env-1.0-py3-none-any.whl").unlink()

    async def work(host):
        settings = {"identity_file": host.key, "own_settings": False, "tell": told.append}
        link = SshConnection(host.target, known_hosts=host.folder / "known", **settings)
        software = await bootstrap(link, tell=told.append, environments=needed("me/letters-env"))
        link.close()
        return software

    told = []
    with sshd(tmp_path / "host") as host:
        software = asyncio.run(work(host))
    (there,) = Path(software.environments).glob("*/environment.json")
    found = json.loads(there.read_text())
    assert (found["name"], found["requirements"]) == ("letters-env", ["letters-dep==1.0", "letters-env==1.0"])
    assert not [line for line in told if "warning" in line]
