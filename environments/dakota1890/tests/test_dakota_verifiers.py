"""Parts of the `verifiers` adapters that can be checked without `verifiers`."""

import importlib.util
import json
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from tests.places import ROOT

import dakota1890
from buckeye.workers.loading import load_environment
from dakota1890.arguments import check_arguments
from dakota1890.environment import DakotaEnvironment
from dakota1890.errors import ArgumentError
from dakota1890.grading import grade
from dakota1890.rows import VerifiersError, from_info, split_items, to_info

without_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed"
)


def arguments(**changes):
    given = {"families": ["conjugate", "numerals", "possess"], "num_train": 50}
    return check_arguments(**{**given, **changes})


def test_importing_the_package_imports_nothing_else_of_it():
    line = (
        "import sys, dakota1890; names = [n for n in sys.modules if n.startswith(('dakota1890.', 'buckeye', "
        "'verifiers', 'datasets', 'torch'))]; print(names)"
    )
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_tasks_and_the_grading_need_neither_buckeye_nor_verifiers():
    line = (
        "import sys; sys.modules.update(dict.fromkeys(('buckeye', 'verifiers', 'datasets')));"
        "from dakota1890.grading import grade; from dakota1890.tasks import *;"
        "item = TrainTasks(TaskOptions(), 5)[3];"
        "text = '<answer>' + item.data['accept'][0] + '</answer>';"
        "print(grade(text, item.data, shaping=True).reward)"
    )
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1.0"), done.stderr


def test_required_verifiers_does_not_replace_mcp():
    project = tomllib.loads((ROOT / "environments/dakota1890/pyproject.toml").read_text())["project"]
    (needed,) = map(Requirement, project["dependencies"])
    assert needed.name == "verifiers"
    assert list(needed.specifier.filter(["0.1.13", "0.1.14", "0.2.1", "0.3.1", "0.4.0"])) == ["0.1.14"]


@without_verifiers
@pytest.mark.parametrize(
    ("use", "api"), [(lambda: dakota1890.load_environment(), "v0"), (lambda: dakota1890.DakotaTaskset, "v1")]
)
def test_without_verifiers_the_message_says_what_to_install(use, api, wording):
    with pytest.raises(VerifiersError) as caught:
        use()
    message = str(caught.value)
    assert message == wording


def test_an_error_inside_verifiers_is_not_taken_for_a_missing_one(tmp_path, monkeypatch):
    (tmp_path / "verifiers.py").write_text("import a_dependency_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "verifiers", raising=False)
    with pytest.raises(ModuleNotFoundError, match="a_dependency_that_is_not_there"):
        dakota1890.load_environment()


def test_buckeye_loads_its_own_environment():
    assert isinstance(load_environment("harleycooper/dakota1890"), DakotaEnvironment)


@pytest.mark.parametrize("split", ["train", "eval", "random", "lemma", "cell", "range"])
def test_the_items_of_a_split_are_the_tasks_of_buckeyes_environment(split):
    environment = load_environment("dakota1890", families=["conjugate", "numerals", "possess"], num_train=50)
    items = split_items(arguments(), split)
    tasks = environment.tasks(split)
    assert len(items) == len(tasks) > 20
    assert [item.id for item in items] == [task.id for task in tasks]


def test_unknown_split_error_lists_the_splits(refusal):
    with refusal(ArgumentError):
        split_items(arguments(), "lema")


def test_train_split_of_eval_only_families_is_refused(refusal):
    chosen = arguments(families=["exceptions"])
    assert len(split_items(chosen, "eval")) > 20
    with refusal(ArgumentError):
        split_items(chosen, "train")


def test_info_survives_json():
    for split in ("train", "eval"):
        for item in split_items(arguments(families=None), split):
            task_id, data = from_info(json.loads(json.dumps(to_info(item), ensure_ascii=False)))
            assert (task_id, data) == (item.id, item.data)
            text = f"<answer>{item.data['accept'][0]}</answer>"
            assert grade(text, data, shaping=True).reward == 1.0
