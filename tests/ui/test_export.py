"""A run in one file: everything the page asks for is in it, and nothing in it can run but the page."""

import base64
import hashlib
import json
import re
from unittest import mock

import pytest

from buckeye.ui.export import _spread
from tests.command import run_here
from tests.run.made_runs import made_run
from tests.ui.made import HOSTILE, make_run

SECRETS = ("correct-horse-battery", "sk-abcdefghijklmnopqrstuvwxyz012345")


def reported(*words, cwd):
    with mock.patch("buckeye.ui.findings._diagnose", return_value={"findings": []}):
        return run_here("rl", "report", *words, cwd=cwd)


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
    done = reported("a run", "--out", "run.html", cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "run.html: 5 of 5 groups have their texts in it\n"
    return place


def test_the_file_holds_every_answer(exported):
    text = (exported / "run.html").read_text(encoding="utf-8")
    (held,) = re.findall(r'<script type="application/json" id="answers">(.*?)</script>', text, re.S)
    answers = json.loads(held)
    assert answers["runs"]["runs"][0]["name"] == "a run"
    for name in ("status", "overview", "intervals", "groups", "logs", "timeline", "metrics"):
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


def test_folders_of_this_machine_are_not_in_it(exported):
    assert str(exported) not in (exported / "run.html").read_text(encoding="utf-8")


def test_report_is_in_the_run_by_default_and_replaced(exported):
    for _ in range(2):
        done = reported("a run", cwd=exported)
        assert (done.returncode, done.stdout) == (
            0,
            "a run/report.html: 5 of 5 groups have their texts in it\n",
        )
    assert (exported / "a run" / "report.html").is_file()


def test_what_cannot_be_reported(exported, tmp_path):
    (tmp_path / "file").write_text("mine")
    existing = reported(exported / "a run", "--out", "file", cwd=tmp_path)
    assert (existing.returncode, "exists already" in existing.stderr) == (2, True)
    assert (tmp_path / "file").read_text() == "mine"
    nowhere = reported(exported / "a run", "--out", "file/run.html", cwd=tmp_path)
    assert (nowhere.returncode, "cannot be written" in nowhere.stderr) == (2, True)
    empty = reported(made_run(tmp_path / "empty"), cwd=tmp_path)
    assert (empty.returncode, "no step is recorded yet" in empty.stderr) == (1, True)
    nothing = reported(tmp_path / "nothing", cwd=tmp_path)
    assert (nothing.returncode, "is no directory, name or id" in nothing.stderr) == (2, True)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_what_is_taken_first_is_spread_evenly(count):
    order = list(_spread(count))
    assert sorted(order) == list(range(count))
    assert count < 3 or order[:2] == [0, count - 1]
