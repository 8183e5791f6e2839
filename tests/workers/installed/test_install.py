"""`buckeye env install` and the other `env` commands as a user runs them, on a local package index."""

import json
import os
import subprocess
import sys

import pytest
from tests.command import check_json
from tests.workers.installed.package_index import serving, wheel

pytestmark = pytest.mark.e2e


SUMS = """
from toy_dep import PRICE


def load_environment(**args):
    return None
"""
LOADER = "def load_environment(**args):\n    return None\n"
FUTURE = "[buckeye.environments]\nfuture = future:load_environment\n"
OURS = "[buckeye.environments]\nsums = sums:load_environment\n"


class Person:
    """User who runs commands with a separate home directory and no active virtual environment."""

    def __init__(self, folder, **variables):
        self.home = folder / "home"
        kept = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PRIME_API_KEY")}
        own = {
            "HOME": str(folder),
            "BUCKEYE_HOME": str(self.home),
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "UV_NO_CACHE": "1",  # the index changes a file under the same name
        }
        self.variables = {**kept, **own, **variables}

    def env(self, *words, seconds=300):
        argv = [sys.executable, "-m", "buckeye", "env", *map(str, words)]
        done = subprocess.run(
            argv, capture_output=True, text=True, env=self.variables, timeout=seconds, check=False
        )
        check_json(argv[3:], done.stdout)
        return done

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
    described = json.loads(person.env("list", "sums", "--json").stdout)
    assert described == row | {"bytes": described["bytes"]}
    assert described["bytes"] > 0


def test_environment_folder_has_its_own_interpreter_and_a_lock(installed):
    person, _ = installed
    folder = person.home / "environments" / "sums"
    python = folder / "venv" / "bin" / "python"
    code = "import sums; print(sums.PRICE); import buckeye"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "3\n")
    assert "ModuleNotFoundError" in done.stderr
    for path in [folder / "venv" / "pyvenv.cfg", *(folder / "venv" / "bin").iterdir()]:
        assert b".tmp-" not in path.read_bytes() or path.is_symlink()  # path of the temporary folder
    lock = (folder / "requirements.lock").read_text()
    assert lock.startswith("# maker/sums 1.0, Python 3.")
    assert lock.count("--hash=sha256:") == 2
    assert "toy-dep==3.0 \\\n" in lock


@pytest.mark.parametrize(("extra", "version"), [([], "0.3.1"), (["--with", "verifiers==0.1.14"], "0.1.14")])
def test_requested_version_replaces_the_default_bound(index, tmp_path, extra, version):
    person = Person(tmp_path)
    done = person.env("install", "maker/loader", "--index", index[0], "--no-smoke", *extra)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(person.env("list", "--json").stdout)
    assert f"verifiers=={version}" in row["requirements"]
    assert any(bound.startswith("verifiers==") for bound in row["constraints"]) == (not extra)
    assert "renderers<0.1.11" in row["constraints"]


def test_required_python_is_named_with_the_command(tmp_path):
    made = wheel(tmp_path, "future", "1.0", files={"future.py": LOADER}, entry_points=FUTURE, python=">=3.14")
    done = Person(tmp_path).env("install", made, "--no-smoke")
    assert done.returncode == 1
    assert f"buckeye env install {made} --python 3.14\n" in done.stderr


def test_a_second_install_and_an_unknown_name_are_refused(installed):
    person, _ = installed
    misspelt = person.env("check", "summs")
    assert (misspelt.returncode, "did you mean `maker/sums`?" in misspelt.stderr.lower()) == (2, True)
    again = person.env("install", "maker/sums")
    assert (again.returncode, "--force" in again.stderr) == (2, True)
    unknown = person.env("list", "other/sums")
    assert unknown.returncode == 2
    assert "buckeye env install other/sums" in unknown.stderr
    assert person.env("remove", "sums").returncode == 2  # not a terminal
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

    wheel(wheels, "toy-dep", "3.0", files={"toy_dep.py": "PRICE = 666\n"})  # same version, other content
    done = other.env("install", "maker/sums", "--index", url, "--locked", lock, "--no-smoke", "--force")
    assert done.returncode == 1
    assert "hash" in done.stderr.lower()
    assert json.loads(other.env("list", "--json").stdout) == [row]  # the old one is unchanged


@pytest.mark.slow
def test_failed_install_leaves_no_files(index, tmp_path):
    url, asked, _ = index
    person = Person(tmp_path, PRIME_API_KEY="secret-key", PRIME_API_BASE_URL=url.removesuffix("/simple/"))
    no_environment = person.env("install", "nothing", "--index", url, "--no-smoke")
    assert (no_environment.returncode, "has no environment" in no_environment.stderr) == (1, True)
    private = person.env("install", "maker/private", "--index", url)
    assert private.returncode == 1
    assert "maker/private" in private.stderr
    assert "secret-key" not in private.stderr + private.stdout
    with_key = [path for path, key in asked if key == "Bearer secret-key"]
    assert with_key == ["/api/v1/environmentshub/maker/private/@latest"]
    assert person.environments == []


@pytest.mark.slow
def test_remove_deletes_the_folder_unless_it_is_in_use(index, tmp_path):
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
    assert (done.returncode, done.stdout) == (0, "maker/sums 1.1 removed\n")
    assert person.environments == []
