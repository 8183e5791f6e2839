"""Finding an environment by id, version, path; and saying clearly why one cannot be had."""

import asyncio
import logging
import sys
import textwrap
from importlib import metadata

import pytest

from buckeye.envs import registry
from buckeye.envs.base import Environment, Reply
from buckeye.envs.registry import EnvironmentId
from buckeye.errors import EnvironmentNotFoundError, UsageError
from buckeye.workers import opening
from buckeye.workers.opening import load_environment

GOOD = textwrap.dedent(
    """
    from dataclasses import dataclass

    @dataclass
    class Toy:
        name: str
        size: int

        def tasks(self, split):
            return []

        async def rollout(self, task, policy):
            raise NotImplementedError

    def load_environment(size: int = 3, *, colour: str = "red"):
        return Toy("toy", size)
    """
)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the import path into which `install` puts a distribution with an environment."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def install(name, code=GOOD, version="1.2.3", announced=True):
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if announced:
            group = f"[{registry.ENTRY_POINT_GROUP}]\n{name} = {module}:load_environment\n"
            (info / "entry_points.txt").write_text(group)

    yield install
    for module in set(sys.modules) - before:
        del sys.modules[module]


@pytest.mark.parametrize(
    "env_id", ["toy-env", "owner/toy-env", "toy_env", "toy-env@1.2.3", "o/toy-env@latest"]
)
@pytest.mark.parametrize("announced", [True, False], ids=["entry point", "module"])
def test_an_installed_environment_is_found_by_any_form_of_its_id(site, env_id, announced):
    site("toy-env", announced=announced)
    environment = load_environment(env_id, size=7)
    assert isinstance(environment, Environment)
    assert environment.size == 7


def test_a_newer_release_of_the_series_serves_and_says_so(site, caplog):
    site("toy-env", version="1.2.9")
    with caplog.at_level(logging.INFO):
        load_environment("owner/toy-env@1.2.3")
    assert "toy-env 1.2.9 is installed and serves for 1.2.3" in caplog.text


@pytest.mark.parametrize("asked", ["1.2.4", "1.1.9", "1.3", "2.0.0", "1.2.3.post1"])
def test_another_version_is_refused_with_the_install_command(site, asked):
    site("toy-env", version="1.2.3")
    with pytest.raises(UsageError) as caught:
        load_environment(f"owner/toy-env@{asked}")
    assert "toy-env 1.2.3 is installed" in str(caught.value)
    assert f"uv pip install toy-env=={asked}" in str(caught.value)


@pytest.mark.parametrize("env_id", ["toy@one", "toy@1.2.x"])
def test_a_version_that_is_none_is_refused(site, env_id):
    site("toy")
    with pytest.raises(UsageError, match="is not a version"):
        load_environment(env_id)


@pytest.mark.parametrize(
    "env_id", ["", "a/b/c", "owner/", "@1.0", "na me", "toy@", "own er/toy", "toy@1@2", "-x"]
)
def test_what_is_no_id_is_refused(env_id):
    with pytest.raises(UsageError, match="is not an environment id"):
        load_environment(env_id)


def test_ids_are_parsed():
    assert EnvironmentId.parse("a/b-c@1.0") == EnvironmentId("a", "b-c", "1.0")
    assert EnvironmentId.parse("b.c").module == "b_c"


def test_a_missing_one_names_the_id_close_matches_and_the_install_commands(site):
    site("toy-env")
    with pytest.raises(EnvironmentNotFoundError) as caught:
        load_environment("owner/toi-env@1.0.1")
    message = str(caught.value)
    assert "'owner/toi-env@1.0.1' is not installed. Did you mean toy-env?" in message
    assert (
        "uv pip install toi-env==1.0.1 --extra-index-url https://hub.primeintellect.ai/owner/simple/"
        in message
    )
    assert "buckeye env install owner/toi-env@1.0.1" in message


def test_a_missing_one_without_any_like_it_lists_what_is_installed(monkeypatch):
    monkeypatch.setattr(opening, "installed_environments", lambda: ["alpha", "beta"])
    with pytest.raises(EnvironmentNotFoundError, match="Installed: alpha, beta"):
        load_environment("zzzzzz")


def test_a_module_without_the_function_is_no_environment():
    with pytest.raises(EnvironmentNotFoundError):
        load_environment("json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"siez": 3}, r"takes no argument 'siez'. Did you mean 'size'\? It takes: size, colour"),
        ({"zzz": 3}, r"takes no argument 'zzz'. It takes: size, colour"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_accepted_ones(site, arguments, message):
    site("toy")
    with pytest.raises(UsageError, match=message):
        load_environment("toy", **arguments)


def test_a_needed_argument_is_named(site):
    site("toy", "def load_environment(path, other=1): ...")
    with pytest.raises(UsageError, match="needs the argument 'path'"):
        load_environment("toy", other=2)


def test_free_arguments_are_passed_on(site):
    site("toy", GOOD.replace('*, colour: str = "red"', "**rest"))
    assert load_environment("toy", anything=1).size == 3


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def load_environment(): return object()", "has no name, tasks, rollout"),
        ("def load_environment(): raise ValueError('bad data')", "could not be built .*ValueError: bad data"),
        (
            "import not_installed_anywhere\ndef load_environment(): ...",
            "needs the module 'not_installed_anywhere'",
        ),
        ("1 / 0", "could not be imported: ZeroDivisionError"),
        ("def broken(:", "could not be imported: SyntaxError"),
    ],
)
def test_foreign_failures_become_one_message(site, code, message):
    site("toy", code)
    with pytest.raises(UsageError, match=message):
        load_environment("toy")


def test_our_own_errors_pass_unchanged(site):
    site("toy", "from buckeye.errors import UsageError\ndef load_environment(): raise UsageError('as it is')")
    with pytest.raises(UsageError, match=r"^as it is$"):
        load_environment("toy")


def test_a_python_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    assert load_environment(str(path), size=5).size == 5


@pytest.mark.parametrize("layout", ["src", "."])
@pytest.mark.parametrize("announced", [True, False])
def test_a_project_folder(tmp_path, monkeypatch, layout, announced):
    name = f"proj_{layout.strip('.') or 'flat'}_{announced}".lower()
    package = tmp_path / layout / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("" if announced else GOOD)
    (package / "env.py").write_text(GOOD)
    entry = f'[project.entry-points."{registry.ENTRY_POINT_GROUP}"]\nx = "{name}.env:load_environment"\n'
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\nname = "{name.replace("_", "-")}"\n' + (entry if announced else "")
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_environment(str(tmp_path), size=4).size == 4
    monkeypatch.chdir(tmp_path.parent)
    assert load_environment(f"./{tmp_path.name}").name == "toy"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "has no module"),
        (lambda folder: (folder / "pyproject.toml").write_text("[project\n"), "not valid TOML"),
        (
            lambda folder: (folder / f"{folder.name}.py").write_text("x = 1"),
            "defines no function load_environment",
        ),
    ],
)
def test_a_project_folder_that_is_none(tmp_path, monkeypatch, make, message):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "empty_project_of_nobody"
    folder.mkdir()
    make(folder)
    with pytest.raises(UsageError, match=message):
        load_environment(str(folder))


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(EnvironmentNotFoundError, match="does not exist"):
        load_environment(str(tmp_path / "nowhere.py"))


class AnsweringYes:
    async def chat(self, messages, *, tools=()):
        return Reply(
            text="<answer></answer>", finish_reason="stop", message={"role": "assistant", "content": ""}
        )


@pytest.mark.parametrize(
    "env_id", ["harleycooper/dakota1890", "dakota1890", "harleycooper/dakota1890@0.1.12"]
)
def test_the_dakota_environment_is_found(env_id):
    pytest.importorskip("dakota1890")
    assert metadata.version("dakota1890").startswith("0.1.")
    environment = load_environment(env_id, num_train=3)
    outcome = asyncio.run(environment.rollout(environment.tasks("train")[0], AnsweringYes()))
    assert outcome.reward == 0.0
