"""Charts of the overview, from recorded metrics."""

import json

from buckeye.ui.charts import overview, reward_intervals
from buckeye.ui.run_catalog import OpenRun
from tests.ui.made import make_run


def chart(told, title):
    return next(one for section in told["sections"] for one in section["charts"] if one["title"] == title)


def test_charts_are_columns_over_the_steps(ask):
    told = ask("overview")
    assert told["steps"] == [0, 1, 2, 3]
    assert told["reward"] == [0.0, 0.1, 0.2, 0.30000000000000004]
    assert told["trained"] == [True] * 4
    assert chart(told, "Entropy")["series"] == [
        {"name": "trainer/entropy", "label": "entropy", "values": [1.0] * 4}
    ]
    spread = chart(told, "Groups without spread")["series"]
    assert [(one["label"], one["values"][0]) for one in spread] == [("all fail", 0.5)]
    (evaluated,) = told["evaluations"]
    assert (evaluated["step"], evaluated["env"], evaluated["exact"]) == (0, "sums", 0.25)
    assert "trainer/loss" in told["names"]
    assert "trainer/time" not in told["names"]  # a time, not a metric


def test_intervals_are_of_the_means_of_groups(ask):
    told = ask("intervals")
    assert told["steps"] == [0, 1, 2, 3]
    assert all(low < 0.375 < high for low, high in zip(told["low"], told["high"], strict=True))


def test_numbers_are_found_by_a_regular_expression(ask):
    told = ask("metrics", pattern="^trainer/(loss|entropy)$")
    assert told["found"] == 2
    assert [one["name"] for one in told["series"]] == ["trainer/entropy", "trainer/loss"]


def test_a_run_that_goes_on_is_read_on(tmp_path):
    path = make_run(tmp_path / "run", steps=2, tokens=False)
    run = OpenRun("run", path)
    before = run.stamp()
    assert overview(run)["steps"] == [0, 1]
    assert reward_intervals(run)["steps"] == [0, 1]
    record = {"time": 1.7e9, "attempt": 1, "process": "trainer", "step": 2, "loss": 0.25}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n" + '{"half a li')
    assert overview(run)["steps"] == [0, 1, 2]
    assert {name for name, value in run.stamp().items() if value != before[name]} == {"metrics", "rollouts"}
    (path / "metrics.jsonl").write_text(json.dumps(record) + "\n")  # the file was replaced by another
    assert overview(run)["steps"] == [2]


def test_attempts_that_were_given_up_are_not_drawn(tmp_path):
    path = make_run(tmp_path / "run", steps=3, tokens=False)
    again = {"time": 1.7e9, "attempt": 2, "process": "trainer", "step": 1, "loss": 9.0}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    told = overview(OpenRun("run", path))
    assert told["steps"] == [0, 1]
    assert chart(told, "Loss")["series"][0]["values"] == [0.5, 9.0]
