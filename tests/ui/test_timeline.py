"""Timeline of a run, from the seconds that processes recorded."""

import json

from buckeye.ui.run_catalog import OpenRun
from buckeye.ui.timeline import TimelineStep, timeline
from tests.ui.made import STARTED, make_run


def lane(told, name):
    return next(one["spans"] for one in told["lanes"] if one["name"] == name)


def test_the_parts_of_a_step_end_when_it_was_recorded(ask):
    """Step 1 is recorded at second 15, after 2 s of waiting, 3 s of computing and 1 s of publishing."""
    told = ask("timeline")
    spans = [span for span in lane(told, "trainer") if span[3] == 1]
    assert [(span[0] - STARTED, span[1] - STARTED, span[2]) for span in spans] == [
        (9.0, 11.0, "wait"),
        (11.0, 14.0, "compute"),
        (14.0, 15.0, "publish"),
    ]
    assert lane(told, "orchestrator")[0][:3] == [STARTED + 3.0, STARTED + 5.0, "wait_for_rollouts"]
    assert [mark["event"] for mark in told["marks"]] == ["weights"] * 4


def test_rollouts_of_a_chosen_step_are_there_one_by_one(ask):
    spans = lane(ask("timeline", step=2), "rollouts of sums")
    assert len(spans) == 8
    assert spans[0][:2] == [STARTED + 20.5, STARTED + 22.0]
    assert spans[0][4] == "group 4, reward 0.0"


def test_engines_show_the_version_that_they_sample_with(tmp_path):
    path = make_run(tmp_path / "run", steps=0, tokens=False)
    with (path / "metrics.jsonl").open("w") as file:
        for step, version in enumerate((0, 0, 1)):
            values = {"inference/0/weight_version": version, "time/total": 1.0}
            head = {"time": STARTED + step + 1, "attempt": 1, "process": "orchestrator", "step": step}
            file.write(json.dumps({**head, **values}) + "\n")
    told = timeline(OpenRun("run", path), TimelineStep())
    assert lane(told, "engine 0") == [
        (STARTED, STARTED + 2, "version", 0, "version 0"),
        (STARTED + 2, STARTED + 3, "version", 2, "version 1"),
    ]
