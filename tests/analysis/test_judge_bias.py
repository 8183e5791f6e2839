"""Biases of a judge in `buckeye env check`, computed by hand for 20 tasks, with Wilson's 95 % intervals."""

import asyncio
import math

import pytest
from tests.places import ROOT

from buckeye.evaluation.env_check import CheckOptions, check_environment
from buckeye.monitor.intervals import student_quantile, wilson_interval

JUDGED = str(ROOT / "tests/envs/judged.py")
LENGTH, POSITION = "length bias of the judge", "position bias of the judge"
NONE = wilson_interval(0, 20)[1]
"""Upper bound of a share that was 0 in all tasks."""
QUARTER = wilson_interval(5, 20)
"""Bounds of a share of 0.25 in each task."""

HALF = wilson_interval(9.5, 19, student_quantile(19))
"""Bounds of a share that was 1 in half of the tasks; their variance leaves 19 observations."""


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Replace the second process, whose start takes a second."""
    monkeypatch.setattr(
        "buckeye.evaluation.env_check.fingerprint_in_new_process", lambda *_: "not started in this test"
    )


def measured(path=JUDGED, **args):
    options = CheckOptions(sample=25, budget=20.0)
    report = asyncio.run(check_environment(path, args, options))
    statuses = {check.name: check.status for check in report.checks}
    return {bias["kind"]: bias for bias in report.to_json()["judge"]}, statuses


@pytest.mark.parametrize(
    ("bias", "length", "position", "statuses"),
    [
        ("", (0.0, -NONE, NONE), (0.0, 0.0, NONE), ("pass", "pass")),
        (
            "length",  # a padded reply scores 0.25 more, also a wrong one
            (0.25, 0.25 - math.hypot(0.25 - QUARTER[0], NONE), QUARTER[1]),
            (0.0, 0.0, NONE),
            ("warning", "pass"),
        ),
        ("first", (0.0, -NONE, NONE), (1.0, wilson_interval(20, 20)[0], 1.0), ("pass", "warning")),
        ("sometimes first", (0.0, -NONE, NONE), (0.5, *HALF), ("pass", "warning")),
    ],
)
def test_biases_are_measured(bias, length, position, statuses):
    found, status = measured(bias=bias)
    for kind, expected, calls in (("length", length, 80), ("position", position, 40)):
        values = [found[kind][name] for name in ("value", "low", "high")]
        assert values == pytest.approx(expected)
        assert found[kind]["calls"] == calls
    assert (found["length"]["component"], found["position"]["component"]) == ("quality", None)
    assert (status[LENGTH], status[POSITION]) == statuses


def test_judge_that_fails_is_an_error():
    found, status = measured(bias="broken")
    assert (list(found), status[LENGTH], status[POSITION]) == (["length"], "pass", "error")


def test_environment_without_a_judge_has_no_bias():
    found, status = measured(str(ROOT / "tests/envs/toy.py"), variant="honest")
    assert (found, {LENGTH, POSITION} & status.keys()) == ({}, set())
