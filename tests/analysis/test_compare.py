"""`rl compare`: the better of two runs, the size of the difference, and differing settings."""

import json
import shutil

import pytest
from tests.command import run_here

from buckeye.analysis.comparison.curves import difference_of, mean_of
from buckeye.run_files.events import write_event

PLANS = {"trainer": {"optim": {"lr": 1e-3}, "max_steps": 4}, "orchestrator": {"max_steps": 4}}


def rollouts(path, rewards, prompt="task {}", env="e"):
    """Write a line for each reward of each task."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {"task_id": task, "group": group, "env": env, "reward": reward, "text": [f"{task} {number}"],
         "messages": [{"role": "user", "content": prompt.format(task)}, {"role": "assistant", "content": ""}]}
        for group, (task, known) in enumerate(rewards.items())
        for number, reward in enumerate(known)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write(run, steps, *, settings=PLANS, prompt="task {}"):
    """Write a run whose steps have tasks with these rewards."""
    for step, rewards in enumerate(steps):
        rollouts(run / "rollouts" / f"step_{step}.jsonl", rewards, prompt)
    lines = [
        {"time": step, "process": process, "step": step, **values}
        for step, rewards in enumerate(steps)
        for process, values in {
            "orchestrator": {
                "reward/mean": sum(map(sum, rewards.values())) / sum(map(len, rewards.values()))
            },
            "trainer": {"tokens": 100},
        }.items()
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "configs").mkdir()
    (run / "configs" / "rl.json").write_text(json.dumps(settings))
    return run


def step(*means):
    """Return tasks 0, 1, ... with two rollouts each, which both have the given mean as reward."""
    return {f"t{task}": [mean, mean] for task, mean in enumerate(means)}


LOW, HIGH = step(0.0, 0.1, 0.2, 0.3, 0.2, 0.1, 0.0, 0.3), step(0.5, 0.7, 0.7, 0.7, 0.8, 0.6, 0.5, 0.8)


@pytest.fixture
def compared(tmp_path):
    """Return a function that compares the runs `a` and `b` and returns the JSON result."""

    def compare():
        done = run_here("rl", "compare", "a", "b", "--json", cwd=tmp_path)
        assert done.stderr == ""
        return json.loads(done.stdout)

    return compare


def test_b_is_better_task_by_task(tmp_path, compared, wording):
    write(tmp_path / "a", [LOW] * 4)
    write(tmp_path / "b", [LOW, LOW, LOW, HIGH])
    found = compared()
    verdict = found["verdict"]
    assert verdict["outcome"] == "better"
    assert verdict["difference"]["value"] == pytest.approx(4.1 / 8)  # 5.3 / 8 - 1.2 / 8
    assert 0.1 < verdict["difference"]["low"] < 4.1 / 8 < verdict["difference"]["high"] < 0.7
    text = run_here("rl", "compare", "a", "b", cwd=tmp_path).stdout
    assert text == wording
    worse = run_here("rl", "compare", "b", "a", cwd=tmp_path).stdout
    assert worse == wording


def test_runs_that_chance_can_tell_apart_are_not(tmp_path, compared):
    write(tmp_path / "a", [LOW] * 4)
    write(tmp_path / "b", [step(0.1, 0.0, 0.3, 0.2, 0.1, 0.2, 0.3, 0.1)] * 4)
    assert compared()["verdict"]["outcome"] not in ("better", "worse")


def test_other_tasks_are_compared_by_welch(tmp_path, compared):
    write(tmp_path / "a", [step(0.0, 0.2, 0.4)])
    write(tmp_path / "b", [step(1.0, 0.8, 0.6)], prompt="another {}")
    found = compared()
    (part,) = found["parts"]
    assert not part["paired"]
    # means 0.2 and 0.8, deviations 0.2: error sqrt(2 x 0.04 / 3), 4 degrees of freedom, t = 2.776
    assert part["difference"]["value"] == pytest.approx(0.6)
    assert part["difference"]["low"] == pytest.approx(0.6 - 2.776 * 0.16330, abs=1e-3)
    (tasks,) = found["tasks"]
    assert tasks == {"split": "train", "a": 3, "b": 3, "shared": 0, "changed": 3}


def test_only_the_steps_that_both_have_are_compared(tmp_path, compared):
    write(tmp_path / "a", [LOW] * 8)
    write(tmp_path / "b", [LOW, LOW, LOW, HIGH])
    parts = compared()["parts"]
    assert [(one["first"], one["last"]) for one in parts] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert parts[-1]["difference"]["value"] == pytest.approx(4.1 / 8)


def test_an_evaluation_of_the_same_version_decides(tmp_path, compared, wording):
    for name, evaluated in (("a", HIGH), ("b", LOW)):
        run = write(tmp_path / name, [LOW] * 4)
        rollouts(run / "evals" / "step_0" / "e.jsonl", LOW)
        rollouts(run / "evals" / "step_2" / "e.jsonl", evaluated)
    rollouts(tmp_path / "b" / "evals" / "step_4" / "e.jsonl", HIGH)
    found = compared()
    assert [one["version"] for one in found["evaluations"]] == [0, 2]
    assert found["verdict"]["outcome"] == "worse"
    assert found["verdict"]["by"] == wording


def test_an_evaluation_of_equal_tasks_in_two_environments_counts_both(tmp_path, compared):
    for name, evaluated in (("a", HIGH), ("b", LOW)):
        folder = write(tmp_path / name, [LOW, LOW]) / "evals" / "step_2"
        rollouts(folder / "e.jsonl", LOW)
        rollouts(folder / "f.jsonl", evaluated, env="f")
    assert compared()["verdict"]["difference"]["value"] == pytest.approx(-4.1 / 16)


def test_what_differs_is_named_once(tmp_path, compared, wording):
    other = {"trainer": {"optim": {"lr": 3e-3}, "max_steps": 9}, "orchestrator": {"max_steps": 9}}
    for name, settings, torch in (("a", PLANS, "2.1"), ("b", other, "2.2")):
        run = write(tmp_path / name, [LOW] * 4, settings=settings)
        versions = {"Python": "3.12.1", "torch": torch, "code": "abc"}
        write_event(run, "start", attempt=1, versions=versions, machine={"cores": 2})
    found = compared()
    assert [(one["name"], one["a"], one["b"]) for one in found["settings"]] == [
        ("trainer.optim.lr", 1e-3, 3e-3),
        ("trainer.max_steps", 4, 9),
    ]
    assert found["versions"] == [{"name": "torch", "a": "2.1", "b": "2.2"}]
    assert found["machines"] == []
    text = run_here("rl", "compare", "a", "b", cwd=tmp_path).stdout
    assert "  trainer.optim.lr   0.001  0.003\n" in text
    assert text == wording


def test_a_copy_and_a_torn_run_are_compared(tmp_path, compared):
    run = write(tmp_path / "a", [LOW] * 4)
    shutil.copytree(run, tmp_path / "b")
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"process": "orch')
    (tmp_path / "b" / "rollouts" / "step_3.jsonl").write_text('{"task_id": "t0", "rew')
    found = compared()
    assert found["verdict"]["outcome"] not in ("better", "worse")
    assert [one["last"] for one in found["parts"]] == [0, 1, 2, 3]  # the metrics of the last one are complete


def test_what_cannot_be_compared_is_a_failure(tmp_path, wording):
    write(tmp_path / "a", [LOW])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").touch()
    done = run_here("rl", "compare", "a", "b", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == wording
    done = run_here("rl", "compare", "a", "none", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == wording
    done = run_here("rl", "compare", "a", cwd=tmp_path)
    assert done.returncode == 2
    assert "BK-RUN-NO-DATA" in done.stderr


@pytest.mark.parametrize("values", [[3.0], [3.0, 3.0, 3.0]])
def test_values_whose_spread_is_not_known_have_no_interval(values):
    found = mean_of(values)
    assert (found.value, found.low, found.high, found.n) == (3.0, None, None, len(values))
    difference, paired = difference_of(dict(enumerate(values)), {f"b{n}": 5.0 for n in range(3)})
    assert (difference.value, difference.low, difference.high, paired) == (2.0, None, None, False)


def write_evaluation(folder, rewards, prompt="task {}", **settings):
    """Write a folder as `buckeye eval` does."""
    rollouts(folder / "rollouts.jsonl", rewards, prompt)
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line.update(rollout=number, data={})
        del line["group"], line["env"], line["text"]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "settings.json").write_text(json.dumps({"env": "e", **settings}))


def test_two_evaluations_are_compared_task_by_task(tmp_path, compared, wording):
    write_evaluation(tmp_path / "a", LOW, model="base")
    write_evaluation(tmp_path / "b", HIGH | {"t9": [1.0]}, model="trained")
    (found,) = compared()["environments"]
    assert found["difference"]["value"] == pytest.approx(4.1 / 8)
    assert 0.1 < found["difference"]["low"] < 4.1 / 8 < found["difference"]["high"] <= 1.0
    assert (found["difference"]["n"], found["unshared"]) == (8, 1)
    assert run_here("rl", "compare", "a", "b", cwd=tmp_path).stdout == wording


def test_evaluations_without_a_common_task_are_refused(tmp_path, wording):
    write_evaluation(tmp_path / "a", LOW)
    write_evaluation(tmp_path / "b", LOW, prompt="another {}")
    for names in (["a", "b"], ["a"]):
        done = run_here("rl", "compare", *names, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (2, wording)


def test_a_run_is_compared_before_and_after_training(tmp_path, wording):
    run = write(tmp_path / "a", [LOW] * 4)
    for version, evaluated in ((0, LOW), (2, LOW), (4, HIGH)):
        rollouts(run / "evals" / f"step_{version}" / "e.jsonl", evaluated)
    assert run_here("rl", "compare", "a", cwd=tmp_path).stdout == wording


def test_interval_of_rewards_from_0_to_1_stays_in_this_range():
    found = mean_of([1.0] * 9 + [0.0])
    assert 0.0 <= found.low < found.high <= 1.0
    difference, paired = difference_of({"a": 0.0, "b": 0.2}, {"c": 1.0, "d": 0.7})
    assert not paired
    assert -1.0 <= difference.low < difference.high <= 1.0
