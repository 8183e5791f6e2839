"""`buckeye env install` and its sisters as a person calls them, on an index of wheels made here."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from tests.workers.installed.package_index import serving, wheel

from buckeye.workers.installed.venv import NeededPython, python_needed

SUMS = """
from toy_dep import PRICE


def load_environment(**args):
    return None
"""
LOADER = "def load_environment(**args):\n    return None\n"
FUTURE = "[buckeye.environments]\nfuture = future:load_environment\n"
OURS = "[buckeye.environments]\nsums = sums:load_environment\n"


class Person:
    """Types commands, with a home of its own and no virtual environment active."""

    def __init__(self, folder, **variables):
        self.home = folder / "home"
        kept = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PRIME_API_KEY")}
        own = {
            "HOME": str(folder),
            "BUCKEYE_HOME": str(self.home),
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "UV_NO_CACHE": "1",  # the index changes what it has under a name
        }
        self.variables = {**kept, **own, **variables}

    def env(self, *words, seconds=300):
        argv = [sys.executable, "-m", "buckeye", "env", *map(str, words)]
        return subprocess.run(
            argv, capture_output=True, text=True, env=self.variables, timeout=seconds, check=False
        )

    @property
    def environments(self):
        folder = self.home / "environments"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    wheels = tmp_path_factory.mktemp("wheels")
    wheel(wheels, "sums", "1.0", files={"sums.py": SUMS}, requires=["toy-dep"], entry_points=OURS)
    wheel(wheels, "sums", "1.1", files={"sums.py": SUMS}, requires=["toy-dep"], entry_points=OURS)
    wheel(wheels, "toy-dep", "3.0", files={"toy_dep.py": "PRICE = 3\n"})
    wheel(wheels, "loader", "1.0", files={"loader.py": LOADER}, requires=["verifiers"])
    wheel(wheels, "verifiers", "0.1.14", files={"verifiers.py": ""})
    wheel(wheels, "verifiers", "0.3.1", files={"verifiers.py": ""})
    wheel(wheels, "nothing", "1.0", files={"nothing.py": "x = 1\n"})
    with serving(wheels) as (url, asked):
        yield url, asked, wheels


@pytest.fixture(scope="module")
def installed(index, tmp_path_factory):
    person = Person(tmp_path_factory.mktemp("person"))
    done = person.env("install", "maker/sums@1.0", "--index", index[0], "--no-smoke")
    assert done.returncode == 0, done.stderr
    return person, done


def test_an_installed_environment_is_listed_and_described(installed):
    person, done = installed
    assert "maker/sums 1.0 (buckeye, Python 3." in done.stdout
    assert 'id = "maker/sums"' in done.stdout
    (row,) = json.loads(person.env("list", "--json").stdout)
    assert (row["name"], row["id"], row["version"], row["module"]) == ("sums", "maker/sums", "1.0", "sums")
    assert row["requirements"] == ["sums==1.0", "toy-dep==3.0"]
    assert json.loads(person.env("info", "sums", "--json").stdout)["bytes"] > 0
    assert person.env("list").stdout.splitlines()[1].split()[:3] == ["maker/sums", "1.0", "buckeye"]


def test_the_shell_has_its_interpreter_first_and_passes_the_exit_code_on(installed):
    person, _ = installed
    code = "import os, sys, sums; print(sys.executable, os.environ['VIRTUAL_ENV'], sums.PRICE); sys.exit(7)"
    done = person.env("shell", "sums", "--", "python", "-c", code, "--debug")
    assert done.returncode == 7
    venv = person.home / "environments" / "sums" / "venv"
    assert done.stdout.split() == [str(venv / "bin" / "python"), str(venv), "3"]


def test_a_misspelt_name_is_answered_with_the_installed_environment(installed):
    person, _ = installed
    done = person.env("check", "sumz")
    assert done.returncode == 2
    assert "environment 'sumz' is not installed. Did you mean maker/sums?" in done.stderr


@pytest.mark.parametrize(("extra", "version"), [([], "0.3.1"), (["--with", "verifiers==0.1.14"], "0.1.14")])
def test_a_version_that_is_asked_for_is_not_bounded_by_us(index, tmp_path, extra, version):
    person = Person(tmp_path)
    done = person.env("install", "maker/loader", "--index", index[0], "--no-smoke", *extra)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(person.env("list", "--json").stdout)
    assert f"verifiers=={version}" in row["requirements"]
    assert any(bound.startswith("verifiers==") for bound in row["constraints"]) == (not extra)
    assert "renderers<0.1.11" in row["constraints"]


def test_another_python_that_is_needed_is_named_with_the_command(tmp_path):
    made = wheel(tmp_path, "future", "1.0", files={"future.py": LOADER}, entry_points=FUTURE, python=">=3.14")
    done = Person(tmp_path).env("install", made, "--no-smoke")
    assert done.returncode == 1
    assert "is not for Python 3." in done.stderr
    assert "but for Python >=3.14" in done.stderr
    assert f"buckeye env install {made} --python 3.14\n" in done.stderr


@pytest.mark.parametrize(
    ("said", "specifier", "version"),
    [
        ("| ERROR: Package 'x' requires a different Python: 3.11.7 not in '>=3.14'", ">=3.14", "3.14"),
        (
            "ERROR: Ignored the following versions: 1.0 Requires-Python <3.9; 1.1 Requires-Python <3.9",
            "<3.9",
            "3.8",
        ),
        (
            "Because the current Python\n  | version (3.11.7) does not satisfy\n  | Python>=3.13 and x",
            ">=3.13",
            "3.13",
        ),
        ("does not satisfy Python>=3.12.4,<3.13 and", ">=3.12.4,<3.13", "3.12"),
    ],
)
def test_what_installers_say_about_the_python_is_understood(said, specifier, version):
    assert python_needed(said) == NeededPython(specifier, version)


@pytest.mark.parametrize("said", ["no such package", "does not satisfy Python>=4", "Requires-Python >=x"])
def test_what_they_say_about_something_else_is_not(said):
    assert python_needed(said) is None


@pytest.mark.parametrize("words", [["pip"], ["pip3"], ["python", "-m", "pip"]], ids=" ".join)
def test_pip_in_the_shell_is_the_environments_own(installed, tmp_path, words):
    """Whatever `pip` is on PATH, and whatever variables say where packages go."""
    person, _ = installed
    astray = {"PATH": f"{other_pip(tmp_path)}:{os.environ['PATH']}", "PIP_TARGET": str(tmp_path / "target")}
    lost = Person(person.home.parent, **astray)
    for before in ([], ["sh", "-c", '"$@"', "sh"]):
        done = lost.env("shell", "sums", "--", *before, *words, "list", "--format", "json")
        assert done.returncode == 0, done.stderr
        assert {"sums", "toy-dep"} < {package["name"] for package in json.loads(done.stdout)}
    assert not (tmp_path / "foreign").exists()


def test_what_is_installed_in_the_shell_is_in_the_environment_and_not_in_ours(installed, index, tmp_path):
    person, _ = installed
    wheel(tmp_path, "late-toy", "1.0", files={"late_toy.py": "x = 1\n"})
    lost = Person(person.home.parent, PIP_TARGET=str(tmp_path / "target"), PIP_PREFIX=str(tmp_path))
    words = ["pip", "install", "--no-index", "--find-links", tmp_path, "late-toy"]
    assert lost.env("shell", "sums", "--", *words).returncode == 0
    assert person.env("shell", "sums", "--", "python", "-c", "import late_toy").returncode == 0
    ours = subprocess.run([sys.executable, "-c", "import late_toy"], capture_output=True, check=False)
    assert ours.returncode == 1
    assert not (tmp_path / "target").exists()
    assert lost.env("shell", "sums", "--", "pip", "uninstall", "-y", "late-toy").returncode == 0


@pytest.mark.parametrize("name", ["pip3.99", "python3.99", "pip2"])
def test_the_pip_or_python_of_another_interpreter_is_refused(installed, tmp_path, name):
    person, _ = installed
    lost = Person(person.home.parent, PATH=f"{other_pip(tmp_path, name)}:{os.environ['PATH']}")
    done = lost.env("shell", "sums", "--", name, "install", "x")
    assert done.returncode == 2
    assert f"'{name}' on PATH is of another interpreter than maker/sums" in done.stderr
    assert not (tmp_path / "foreign").exists()


def test_where_no_pip_can_be_had_only_its_own_programs_run(installed, tmp_path):
    person, _ = installed
    folder = tmp_path / "home" / "environments" / "sums"
    shutil.copytree(person.home / "environments" / "sums", folder, symlinks=True)
    for path in [
        *(folder / "venv" / "bin").glob("pip*"),
        *(folder / "venv").glob("lib/*/site-packages/pip*"),
    ]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    record = folder / "environment.json"
    record.write_text(record.read_text().replace(str(person.home), str(tmp_path / "home")))
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    site.joinpath("ensurepip.pth").write_text(
        "import sys; sys.modules['ensurepip'] = None\n"  # as where a system takes it out
    )
    nowhere = {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1", "PATH": f"{other_pip(tmp_path)}:{os.environ['PATH']}"}
    lost = Person(tmp_path, **nowhere)
    refused = lost.env("shell", "sums", "--", "pip", "install", "x")
    assert refused.returncode == 1
    assert "maker/sums has no `pip` of its own" in refused.stderr
    assert not (tmp_path / "foreign").exists()
    assert lost.env("shell", "sums", "--", "sh", "-c", "pip install x").returncode == 1
    assert not (tmp_path / "foreign").exists()
    assert lost.env("shell", "sums", "--", "python", "-c", "import sums").returncode == 0


def test_a_variable_reaches_the_shell_by_its_name_from_the_key_files(installed, tmp_path):
    person, _ = installed
    secret = person.home / ".env"
    secret.write_text("JUDGE_API_KEY=sesame\n")
    words = ["--", "python", "-c", "import os; print(os.environ.get('JUDGE_API_KEY'))"]
    assert person.env("shell", "sums", *words).stdout == "None\n"
    assert person.env("shell", "sums", "--variables", "JUDGE_API_KEY", *words).stdout == "sesame\n"
    missing = person.env("shell", "sums", "--variables", "OTHER_KEY", *words)
    assert (missing.returncode, "Set it: buckeye auth set OTHER_KEY" in missing.stderr) == (2, True)
    secret.unlink()


def other_pip(folder, name="pip"):
    """A folder with a `pip` that leaves a file where it ran."""
    place = folder / "other-bin"
    place.mkdir(exist_ok=True)
    for called in {name, "pip", "pip3"}:
        program = place / called
        program.write_text(f"#!/bin/sh\ntouch {folder / 'foreign'}\n")
        program.chmod(0o755)
    return place


def test_nothing_names_the_folder_it_was_made_in(installed):
    person, _ = installed
    venv = person.home / "environments" / "sums" / "venv"
    for path in [venv / "pyvenv.cfg", *(venv / "bin").iterdir()]:
        assert b".tmp-" not in path.read_bytes() or path.is_symlink()
    assert person.environments == ["sums"]


def test_the_lock_holds_versions_and_hashes(installed):
    person, _ = installed
    lock = (person.home / "environments" / "sums" / "requirements.lock").read_text()
    assert lock.startswith("# maker/sums 1.0, Python 3.")
    assert lock.count("--hash=sha256:") == 2
    assert "toy-dep==3.0 \\\n" in lock


def test_a_second_install_and_an_unknown_name_are_refused(installed):
    person, _ = installed
    again = person.env("install", "maker/sums")
    assert (again.returncode, "--force" in again.stderr) == (2, True)
    unknown = person.env("info", "other/sums")
    assert unknown.returncode == 2
    assert "(there: sums). Install it: buckeye env install other/sums" in unknown.stderr
    assert person.env("remove", "sums").returncode == 2  # nobody to ask
    assert person.environments == ["sums"]


@pytest.mark.slow
def test_a_lock_brings_the_same_versions_back(index, installed, tmp_path):
    person, (url, _, wheels) = installed[0], index
    lock = tmp_path / "copy.lock"
    lock.write_bytes((person.home / "environments" / "sums" / "requirements.lock").read_bytes())
    wheel(wheels, "toy-dep", "3.1", files={"toy_dep.py": "PRICE = 4\n"})
    other = Person(tmp_path)
    done = other.env("install", "maker/sums", "--index", url, "--locked", lock, "--no-smoke")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(other.env("list", "--json").stdout)
    assert row["requirements"] == ["sums==1.0", "toy-dep==3.0"]

    wheel(wheels, "toy-dep", "3.0", files={"toy_dep.py": "PRICE = 666\n"})  # the same version, other content
    done = other.env("install", "maker/sums", "--index", url, "--locked", lock, "--no-smoke", "--force")
    assert done.returncode == 1
    assert "hash" in done.stderr.lower()
    assert json.loads(other.env("list", "--json").stdout) == [row]  # the old one is untouched


@pytest.mark.slow
def test_what_cannot_be_installed_leaves_nothing(index, tmp_path):
    url, asked, _ = index
    person = Person(tmp_path, PRIME_API_KEY="secret-key", PRIME_API_BASE_URL=url.removesuffix("/simple/"))
    no_environment = person.env("install", "nothing", "--index", url, "--no-smoke")
    assert (no_environment.returncode, "holds no environment" in no_environment.stderr) == (1, True)
    private = person.env("install", "maker/private", "--index", url)
    assert private.returncode == 1
    assert "has no environment maker/private" in private.stderr
    assert "secret-key" not in private.stderr + private.stdout
    with_key = [path for path, key in asked if key == "Bearer secret-key"]
    assert with_key == ["/api/v1/environmentshub/maker/private/@latest"]
    assert person.environments == []


@pytest.mark.slow
def test_remove_takes_the_folder_and_spares_what_is_in_use(index, tmp_path):
    person = Person(tmp_path)
    assert person.env("install", "maker/sums", "--index", index[0], "--no-smoke").returncode == 0
    python = person.home / "environments" / "sums" / "venv" / "bin" / "python"
    user = subprocess.Popen(
        [python, "-c", "import sys; print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    user.stdout.readline()
    refused = person.env("remove", "maker/sums", "--yes")
    user.communicate()
    assert (refused.returncode, f"process {user.pid}" in refused.stderr) == (1, True)
    done = person.env("remove", "maker/sums", "--yes")
    assert (done.returncode, done.stdout) == (0, "maker/sums 1.1 is removed\n")
    assert person.environments == []
