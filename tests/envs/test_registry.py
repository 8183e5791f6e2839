"""Search of an environment by id, version or path, and clear errors when it fails."""

import asyncio
import logging
import sys
import textwrap
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest

from buckeye.envs import registry
from buckeye.envs.base import Environment, Reply, Task, split_names, tasks_of
from buckeye.envs.registry import EnvironmentId
from buckeye.envs.settings import WorkerSettings
from buckeye.errors import EnvironmentNotFoundError, UsageError
from buckeye.mcp.environment import is_mcp
from buckeye.mcp.environment import load_environment as load_mcp_environment
from buckeye.mcp.sandbox.process_runtimes import server_command
from buckeye.orchestrator.environments import NamedEnvironment, load_split
from buckeye.workers import loading
from buckeye.workers.loading import load_environment, open_environment
from tests.places import ROOT

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
GYM = ROOT / "environments" / "text_2048" / "text_2048.yaml"
OWN_ERROR = "from buckeye.errors import UsageError\ndef load_environment(): raise UsageError('unchanged')"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return `install`, which puts a distribution with an environment into a folder on the import path."""
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


def test_newer_patch_release_is_accepted_and_logged(site, caplog, wording):
    site("toy-env", version="1.2.9")
    with caplog.at_level(logging.INFO):
        load_environment("owner/toy-env@1.2.3")
    assert caplog.messages == wording


@pytest.mark.parametrize("asked", ["1.2.4", "1.1.9", "1.3", "2.0.0", "1.2.3.post1", "one", "1.2.x"])
def test_incompatible_or_unknown_version_is_refused(site, asked, refusal):
    site("toy-env", version="1.2.3")
    with refusal(UsageError):
        load_environment(f"owner/toy-env@{asked}")


def test_module_with_another_text_as_its_version_has_no_known_version(tmp_path, monkeypatch):
    (tmp_path / "unversioned_toy.py").write_text("__version__ = 'unknown'\nload_environment = dict\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as caught:
        load_environment("unversioned-toy@1.0")
    assert caught.value.code == "BK-PACKAGE-VERSION"


@pytest.mark.parametrize(
    "env_id", ["", "a/b/c", "owner/", "@1.0", "na me", "toy@", "own er/toy", "toy@1@2", "-x"]
)
def test_malformed_id_is_refused(env_id, refusal):
    with refusal(UsageError):
        load_environment(env_id)


def test_ids_are_parsed():
    assert EnvironmentId.parse("a/b-c@1.0") == EnvironmentId("a", "b-c", "1.0")
    assert EnvironmentId.parse("b.c").module == "b_c"


def test_project_with_a_missing_package_is_to_be_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    project = tmp_path / "uninstalled_toy"
    project.mkdir()
    (project / "pyproject.toml").write_text('[project]\nname = "uninstalled-toy"\n')
    (project / "uninstalled_toy.py").write_text("import not_installed_anywhere")
    with pytest.raises(UsageError) as missing:
        load_environment("./uninstalled_toy")
    assert missing.value.code == "BK-PACKAGE-MISSING"
    assert "buckeye env install ./uninstalled_toy" in missing.value.hint


@pytest.mark.parametrize("env_id", ["owner/toi-env@1.0.1", "zzzzzz", "json", "./nowhere.py"])
def test_missing_environment_error_has_a_close_name_or_else_the_install_command(env_id, monkeypatch, refusal):
    monkeypatch.setattr(loading, "installed_environments", lambda: ["toy-env", "beta"])
    with refusal(EnvironmentNotFoundError):
        load_environment(env_id)


def test_missing_file_error_names_the_closest_file(tmp_path):
    (tmp_path / "capitals.py").write_text(GOOD)
    with pytest.raises(EnvironmentNotFoundError) as missing:
        load_environment(str(tmp_path / "capitols.py"))
    assert f"`{tmp_path / 'capitals.py'}`" in missing.value.hint


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (GOOD, {"siez": 3}),
        (GOOD, {"zzz": 3}),
        ("def load_environment(path, other=1): ...", {"other": 2}),
        ("def load_environment(): return object()", {}),
        ("def load_environment(): raise ValueError('bad data')", {}),
        ("import not_installed_anywhere\ndef load_environment(): ...", {}),
        ("1 / 0", {}),
        ("def broken(:", {}),
        ("import ast\nast.literal_eval('1 +')", {}),
        (OWN_ERROR, {}),
    ],
)
def test_wrong_arguments_and_loader_errors_become_usage_errors(site, code, arguments, refusal):
    site("toy", code)
    with refusal(UsageError):
        load_environment("toy", **arguments)


def test_free_arguments_are_passed_on(site):
    site("toy", GOOD.replace('*, colour: str = "red"', "**rest"))
    assert load_environment("toy", anything=1).size == 3


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
    ("name", "text"),
    [
        (None, ""),
        ("pyproject.toml", "[project\n"),
        ("empty_project_of_nobody.py", "x = 1"),
    ],
)
def test_invalid_project_folder_is_refused(tmp_path, monkeypatch, name, text, refusal):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "empty_project_of_nobody"
    folder.mkdir()
    if name is not None:
        (folder / name).write_text(text)
    with refusal(UsageError):
        load_environment(str(folder))


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


@pytest.mark.parametrize("env_id", ["mcp", "buckeye-vf-gym", "buckeye/Buckeye_VF.gym@latest"])
def test_the_mcp_environment_has_two_ids(env_id):
    assert registry.find_local_loader(env_id) is load_mcp_environment
    assert is_mcp(env_id)


@pytest.mark.parametrize("wrong", ["tasks", "taskset", "task_file", "Tasks", "data_set"])
def test_synonyms_of_dataset_suggest_dataset(wrong):
    with pytest.raises(UsageError, match="Did you mean 'dataset'"):
        load_environment("mcp", **{wrong: "tasks.json", "config_path": "c.yaml"})


LOCAL = ("./mcp", "mcp.py")
LIBRARY_IDS = ("gymnasium/my_games:Race-v0", "inspect-ai//tmp/tasks.py@sums", "openenv/server.app:app")


@pytest.mark.parametrize("env_id", [*LOCAL, "mcp-tools", "reasoning-gym/dice", *LIBRARY_IDS])
def test_other_environments_are_not_the_mcp_environment(env_id):
    assert not is_mcp(env_id)


def test_file_of_an_environment_imports_its_neighbors(tmp_path, monkeypatch, refusal):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_toy.py").write_text("SIZE = 5\n")
    (tmp_path / "local_toy.py").write_text(f"import beside_toy\n{GOOD}".replace("= 3", "= beside_toy.SIZE"))
    assert load_environment(str(tmp_path / "local_toy.py")).size == 5
    (tmp_path / "broken_toy.py").write_text(f"import besides_toy\n{GOOD}")
    with refusal(UsageError) as caught:
        load_environment(str(tmp_path / "broken_toy.py"))
    assert caught.value.code == "BK-PACKAGE-MISSING"
    assert caught.value.at == f"{tmp_path / 'broken_toy.py'}:1"
    assert str(tmp_path) in caught.value.message


def test_file_with_the_name_of_a_module_of_python_does_not_replace_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_calendar.py").write_text("SIZE = 5\n")
    text = f"import beside_calendar\n{GOOD}".replace("= 3", "= beside_calendar.SIZE")
    (tmp_path / "calendar.py").write_text(text)
    assert load_environment(str(tmp_path / "calendar.py")).size == 5
    assert Path(PathFinder.find_spec("calendar").origin).parent != tmp_path


MESSAGE = {"role": "user", "content": "On?"}
WRONG_TASKS = {
    "no list": lambda split: None,
    "generator": lambda split: (task for task in [Task(id="1", messages=(MESSAGE,))]),
    "dicts": lambda split: [{"id": "1", "messages": [MESSAGE]}],
    "number as id": lambda split: [Task(id=1, messages=(MESSAGE,))],
    "text as messages": lambda split: [Task(id="1", messages="On?")],
}


@pytest.mark.parametrize("case", WRONG_TASKS)
def test_tasks_that_are_not_a_list_of_tasks_are_an_error_of_the_environment(refusal, case):
    environment = SimpleNamespace(name="lights", tasks=WRONG_TASKS[case])
    with refusal(UsageError) as caught:
        split_names(environment)
    assert caught.value.code == "BK-ENV-TASKS"


def test_error_of_tasks_is_shown_with_its_line():
    def tasks(split):
        raise ValueError("no such split")

    with pytest.raises(UsageError) as caught:
        split_names(SimpleNamespace(name="lights", tasks=tasks))
    assert caught.value.code == "BK-ENV-TASKS"
    assert f"test_registry.py:{tasks.__code__.co_firstlineno + 1} in tasks" in caught.value.message


def test_asynchronous_tasks_are_an_error_of_the_environment():
    async def tasks(split):
        return []

    with pytest.raises(UsageError) as caught:
        split_names(SimpleNamespace(name="lights", tasks=tasks))
    assert caught.value.code == "BK-ENV-TASKS"


def test_key_error_of_a_split_that_exists_is_shown():
    def tasks(split):
        return [] if split == "eval" else [{}["answer"]]

    environment = SimpleNamespace(name="lights", splits=["train"], tasks=tasks)
    with pytest.raises(UsageError) as caught:
        load_split(NamedEnvironment(name="lights", environment=environment), "train")
    assert caught.value.code == "BK-ENV-TASKS"
    assert "KeyError: 'answer'" in caught.value.message


@pytest.mark.parametrize("split", ["eval", "train[:5]"])
def test_key_error_of_a_lookup_is_a_missing_split(split):
    with pytest.raises(KeyError):
        tasks_of(SimpleNamespace(name="lights", tasks={"train": ()}.__getitem__), split)


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_key_error_of_a_bug_is_not_a_missing_split(tmp_path, isolation):
    (tmp_path / "lights.py").write_text(LIGHTS)
    settings = WorkerSettings(isolation=isolation)
    with pytest.raises(UsageError) as caught:
        split_names(open_environment(str(tmp_path / "lights.py"), {}, settings))
    assert "'eval_path'" in caught.value.message
    assert "lights.py:8" in caught.value.message


@pytest.mark.parametrize("error", ["KeyError", "KeyError('no such split')"])
def test_key_error_in_a_worker_without_the_split_is_a_missing_split(tmp_path, error):
    source = LIGHTS.replace('[{}["eval_path"]]', "[]").replace("return []", f"raise {error}")
    (tmp_path / "lights.py").write_text(source)
    settings = WorkerSettings(isolation="process")
    environment = open_environment(str(tmp_path / "lights.py"), {}, settings)
    with pytest.raises(KeyError):
        tasks_of(environment, "eval")
    assert split_names(environment) == ("train",)


LIGHTS = """
class Lights:
    name = "lights"

    def tasks(self, split):
        from buckeye.envs.base import Task
        if split == "eval":
            return [{}["eval_path"]]
        return [Task(id="1", messages=({"role": "user", "content": "Go."},))]

    async def rollout(self, task, policy):
        raise NotImplementedError


def load_environment():
    return Lights()
"""


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("project = 3", "pyproject.toml:1 (project)"),
        ("[project]\nname = 'x'\nscripts = ['a']", "pyproject.toml:3 (project.scripts)"),
        ("tool = []", "pyproject.toml:1 (tool)"),
        ("[tool]\nbuckeye = 'x'", "pyproject.toml:2 (tool.buckeye)"),
        ("[project]\nentry-points = 1", "pyproject.toml:2 (project.entry-points)"),
    ],
)
@pytest.mark.parametrize("read", [server_command, lambda folder: load_environment(str(folder))])
def test_a_project_with_values_in_place_of_tables_is_refused(tmp_path, text, place, read):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UsageError) as refused:
        read(tmp_path)
    assert refused.value.code == "BK-CONFIG-VALUE"
    assert refused.value.at.endswith(place)


@pytest.mark.parametrize("error", [KeyError, KeyError("eval"), KeyError("no such split")])
def test_key_error_about_a_split_is_a_missing_split(error):
    def tasks(split):
        if split == "eval":
            raise error
        return [Task(id="a", messages=({"role": "user", "content": "x"},))]

    assert split_names(SimpleNamespace(name="lights", tasks=tasks)) == ("train",)
