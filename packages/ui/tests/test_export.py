"""A run in one file: everything the page asks for is in it, and nothing in it can run but the page."""

import base64
import hashlib
import json
import re
from unittest import mock

import pytest
from packages.ui.tests.made import HOSTILE, make_run

from buckeye_ui.export import _spread
from tests.command import run_here

SECRETS = ("correct-horse-battery", "sk-abcdefghijklmnopqrstuvwxyz012345")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    place = tmp_path_factory.mktemp("export")
    make_run(place / "a run", steps=2)
    settings = place / "a run" / "configs" / "rl.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "judge": {"api_key": SECRETS[0]}}))
    rollouts = place / "a run" / "rollouts" / "step_1.jsonl"
    first, *rest = rollouts.read_text().splitlines(keepends=True)
    told = json.loads(first)
    told["messages"][-1]["content"] += f" Bearer {SECRETS[1]}"
    rollouts.write_text(json.dumps(told) + "\n" + "".join(rest))
    with mock.patch("buckeye_ui.findings._diagnose", return_value={"findings": []}):
        done = run_here("ui", "a run", "--export", "run.html", cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "run.html: 5 of 5 groups have their texts in it\n"
    return place


def test_the_file_holds_every_answer(exported):
    text = (exported / "run.html").read_text(encoding="utf-8")
    (held,) = re.findall(r'<script type="application/json" id="answers">(.*?)</script>', text, re.S)
    answers = json.loads(held)
    assert answers["runs"]["runs"][0]["name"] == "a run"
    for name in ("status", "overview", "intervals", "groups", "logs", "timeline", "notes", "metrics"):
        assert f"runs/a%20run/{name}" in answers
    told = answers["runs/a%20run/rollout?group=0&number=1&step=0"]
    assert told["messages"][-1]["text"] == HOSTILE
    assert "runs/a%20run/tokens?group=3&number=0&step=1" in answers
    assert "runs/a%20run/group?env=sums&group=0&split=eval&step=0" in answers


def test_no_secret_is_in_it(exported):
    text = (exported / "run.html").read_text(encoding="utf-8")
    assert not [secret for secret in SECRETS if secret in text]
    assert text.count("(redacted)") >= 2


def test_only_the_page_itself_may_run(exported):
    text = (exported / "run.html").read_text(encoding="utf-8")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    allowed = set(re.findall(r"'sha256-([^']*)'", policy))
    scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
    styles = re.findall(r"<style>(.*?)</style>", text, re.S)
    found = {base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts + styles}
    assert found == allowed
    assert "unsafe" not in policy
    assert text.count("<script") == len(scripts) + 1
    assert "<img" not in text  # of the hostile rollout
    assert not re.search(r'(src|href)="(?!data:|#)', text)


def test_nothing_is_overwritten_and_one_run_is_meant(exported):
    again = run_here("ui", "a run", "--export", "run.html", cwd=exported)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    make_run(exported / "another", steps=1, tokens=False)
    several = run_here("ui", ".", "--export", "all.html", cwd=exported)
    assert (several.returncode, "there are 2" in several.stderr) == (2, True)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_what_is_taken_first_is_spread_evenly(count):
    order = list(_spread(count))
    assert sorted(order) == list(range(count))
    assert count < 3 or order[:2] == [0, count - 1]
