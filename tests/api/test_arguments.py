"""Arguments of `buckeye.train` and `buckeye.evaluate`: flags, refusals, and what a resume needs."""

from pathlib import Path

import numpy as np
import pytest

import buckeye
from buckeye.api import process
from buckeye.api.environment import (
    EnvironmentArguments,
    flatten_settings,
    rows_of,
    saved_arguments,
)
from buckeye.envs.registry import CALLER, CALLER_FILE
from buckeye.errors import ConfigError, UsageError

ROWS = [{"prompt": f"What is {n} + 1?", "answer": n + 1} for n in range(20)]


def reward(completion, answer, **row):
    return float(completion.strip() == str(answer))


def test_settings_become_flags():
    settings = {
        "max_steps": 5,
        "trainer": {"optim": {"lr": 1e-6}},
        "wandb": None,
        "orchestrator.env": [{"id": "x"}],
    }
    assert flatten_settings(settings) == [
        "--max_steps=5",
        "--trainer.optim.lr=1e-06",
        "--wandb=None",
        '--orchestrator.env=[{"id": "x"}]',
    ]


def test_settings_of_numpy_are_their_values():
    settings = {"a": np.int64(3), "b": np.float64(0.5), "c": [np.float32(0.5), Path("x")], "d": np.arange(2)}
    assert flatten_settings(settings) == ["--a=3", "--b=0.5", '--c=[0.5, "x"]', "--d=[0, 1]"]


def test_a_setting_of_another_type_is_refused():
    with pytest.raises(UsageError) as caught:
        flatten_settings({"max_steps": {1, 2}})
    assert caught.value.code == "BK-CONFIG-VALUE"


def test_paths_and_names_need_no_object():
    arguments = EnvironmentArguments(
        dataset="prompts.jsonl", reward=["exact", "reward.py"], reward_weights=[1, 0.5]
    )
    assert not arguments.is_object
    assert arguments.flags() == [
        *("--dataset", "prompts.jsonl", "--reward", "exact", "--reward", "reward.py"),
        *("--reward-weights", "[1, 0.5]"),
    ]
    assert arguments.name == "prompts"
    assert EnvironmentArguments(env="my_env.py").flags() == ["--env", "my_env.py"]


@pytest.mark.parametrize(
    "part", [{"dataset": ROWS, "reward": "exact"}, {"dataset": "p.jsonl", "reward": reward}]
)
def test_rows_and_functions_are_served_by_this_process(part):
    arguments = EnvironmentArguments(**part)
    assert arguments.is_object
    assert arguments.flags() == ["--env", CALLER]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"dataset": ROWS},
        {"reward": reward},
        {"dataset": ROWS, "reward": reward, "env": "mcp"},
        {"dataset": ROWS, "reward": []},
    ],
)
def test_other_than_one_environment_is_refused(wrong):
    with pytest.raises(UsageError) as refused:
        EnvironmentArguments(**wrong)
    assert refused.value.code == "BK-CLI-MISSING"


@pytest.mark.parametrize("wrong", [0.5, [0.5], [reward, None]])
def test_reward_that_is_not_a_function_is_refused(wrong):
    with pytest.raises(UsageError) as refused:
        buckeye.train("model", dataset=ROWS, reward=wrong)
    assert refused.value.code == "BK-REWARD"
    assert EnvironmentArguments(dataset=ROWS, reward=Path("reward.py")).rewards == ("reward.py",)


def test_object_without_the_members_of_an_environment_is_refused():
    with pytest.raises(UsageError) as refused:
        EnvironmentArguments(env=object()).make()
    assert refused.value.code == "BK-ENV-LOAD"


def test_rows_are_split_and_graded():
    environment = EnvironmentArguments(dataset=ROWS, reward=reward).make()
    assert {split: len(environment.tasks(split)) for split in environment.splits}.keys() == {"train", "eval"}
    assert sum(len(environment.tasks(split)) for split in environment.splits) == len(ROWS)


def test_resume_needs_the_function_only(tmp_path):
    EnvironmentArguments(dataset=ROWS, reward=reward, answer_column="answer").save(tmp_path)
    again = saved_arguments(tmp_path, reward, None)
    assert (again.dataset, again.answer_column, again.rewards) == (ROWS, "answer", (reward,))
    with pytest.raises(UsageError) as refused:
        saved_arguments(tmp_path, None, None)
    assert refused.value.code == "BK-ENV-CALLER"
    assert saved_arguments(tmp_path / "other", None, None) is None


def test_resume_reads_the_same_dataset_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    for name, again in (
        ("rows.jsonl", str(tmp_path / "rows.jsonl")),
        ("~/rows.jsonl", str(tmp_path / "rows.jsonl")),
        ("openai/gsm8k", "openai/gsm8k"),
    ):
        EnvironmentArguments(dataset=name, eval_dataset=name, reward=reward).save(tmp_path)
        saved = saved_arguments(tmp_path, reward, None)
        assert (saved.dataset, saved.eval_dataset) == (again, again)


def test_rows_that_are_not_json_are_refused_before_a_start(tmp_path):
    rows = [{"prompt": "p", "value": object()}, {"prompt": "q", "value": 1}]
    with pytest.raises(UsageError) as refused:
        EnvironmentArguments(dataset=rows, reward=reward).save(tmp_path)
    assert refused.value.code == "BK-DATA-FORMAT"
    assert not (tmp_path / CALLER_FILE).exists()


def test_unknown_setting_is_refused_with_a_suggestion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        buckeye.train("model", dataset=ROWS, reward=reward, trainer={"optim": {"learning_rate": 1e-6}})
    assert refused.value.code == "BK-CONFIG-UNKNOWN-KEY"
    assert not list(tmp_path.iterdir())


def test_public_names_are_complete_and_lazy():
    assert {name for name in dir(buckeye) if name in buckeye.__all__} <= set(buckeye.__all__)
    for name in buckeye.__all__:
        assert getattr(buckeye, name) is not None
    with pytest.raises(AttributeError):
        buckeye.unknown  # noqa: B018


class Frame:
    """Stand-in for a DataFrame, which iterates over its columns."""

    def __iter__(self):
        return iter(["prompt", "answer"])

    def iterrows(self):
        raise AssertionError

    def to_dict(self, orient):
        assert orient == "records"
        return ROWS


@pytest.mark.parametrize("dataset", [iter(ROWS), tuple(ROWS), Frame()])
def test_rows_come_from_iterators_and_frames(dataset):
    assert rows_of(dataset) == ROWS


def test_dataset_without_rows_is_refused():
    arguments = EnvironmentArguments(dataset=[], reward=reward)
    assert arguments.is_object
    with pytest.raises(UsageError) as refused:
        arguments.make()
    assert refused.value.code == "BK-DATA-FORMAT"


def test_split_of_rows_is_refused():
    with pytest.raises(UsageError) as refused:
        EnvironmentArguments(dataset=ROWS, reward=reward, split="test").make()
    assert refused.value.code == "BK-CLI-CONFLICT"


def test_problem_of_a_row_is_reported_once_in_an_evaluation_on_all_rows():
    rows = [*ROWS, {"prompt": "p", "answer": None}]
    with pytest.raises(UsageError) as refused:
        EnvironmentArguments(dataset=rows, eval_dataset=rows, reward=reward).make()
    assert refused.value.at == f"row {len(rows)}"


def test_closed_output_does_not_block_the_run(tmp_path, monkeypatch):
    """A pipe holds 64 KiB: if nothing reads it, its writer waits forever."""
    (tmp_path / "talkative.py").write_text("print('a line of output\\n' * 20_000)\n")
    monkeypatch.setattr(process, "__name__", "talkative")
    monkeypatch.setattr("builtins.print", closed_output)
    run = process.RunProcess([], folder=tmp_path, variables={"PYTHONPATH": str(tmp_path)})
    run._process.wait(60)
    assert not run.is_running
    run._printer.join(60)  # or it would print into the output of later tests


def closed_output(*_):
    raise BrokenPipeError
