"""Export of a run to one file: it holds all data that the page requests, and only the page can run in it."""

import base64
import errno
import functools
import hashlib
import json
import os
import re
import shutil
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.config.load import load_config, to_json
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.launch.changed_settings import to_recorded_form
from buckeye.run_files.logs import read_logs
from buckeye.runs.checkpoint_facts import read_config, trained_on
from buckeye.ui.endpoints import call_endpoint
from buckeye.ui.run_catalog import OpenRun
from tests.command import run_here
from tests.run.made_runs import made_run
from tests.ui.made import HOSTILE, make_run

SECRETS = ("correct-horse-battery", "sk-abcdefghijklmnopqrstuvwxyz012345")


def reported(*words, cwd):
    diagnosed = {"cause": None, "findings": [], "links": []}
    with mock.patch("buckeye.ui.findings._diagnose", return_value=diagnosed):
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
    return place


def test_key_files_are_read_at_most_once_per_call_not_once_per_text(exported):
    with mock.patch("buckeye.monitor.redact.variables", return_value={}) as read:
        assert reported("a run", "--out", "again.html", cwd=exported).returncode == 0
    assert read.call_count <= 5


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


def keys_of(settings, above=()):
    for key, value in settings.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*above, key))


RECORDED = json.loads(to_json(to_recorded_form(load_config(RLConfig, ["--trainer", "--orchestrator"]))))


@given(st.sampled_from(sorted(keys_of(RECORDED))), st.sampled_from([None, 7, "x", [], {}, "left out"]))
def test_a_report_and_a_model_card_need_no_setting(exported, path, value):
    """The runs are from other versions."""
    run = exported / "a run"
    settings = json.loads(json.dumps(RECORDED))
    holder = functools.reduce(dict.__getitem__, path[:-1], settings)
    holder[path[-1]] = value
    if value == "left out":
        del holder[path[-1]]
    (run / "configs" / "rl.json").write_text(json.dumps(settings))
    for question in ("status", "overview", "settings", "timeline"):
        call_endpoint(OpenRun("a run", run), question, {})
    try:
        kind, config = read_config(run)
    except UsageError:
        assert path in {("trainer",), ("trainer", "model"), ("trainer", "model", "name")}
    else:
        assert trained_on(kind, config)


def test_a_run_without_attempts_is_refused(tmp_path, refusal):
    run = make_run(tmp_path / "run", steps=1)
    (run / "run.json").write_text(json.dumps({"run_id": "a", "attempt": 1, "attempts": []}))
    with refusal(UsageError):
        read_logs(run)


def test_no_secret_and_no_folder_of_this_machine_is_in_it(exported):
    text = (exported / "run.html").read_text(encoding="utf-8")
    assert not [secret for secret in (*SECRETS, str(exported)) if secret in text]
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
    assert "<img" not in text  # part of the hostile rollout
    assert not re.search(r'(src|href)="(?!data:|#)', text)


def test_report_is_in_the_run_by_default_and_replaced(exported, wording):
    report = exported / "a run" / "report.html"
    shutil.copy(exported / "run.html", report)
    before = report.stat().st_mtime_ns
    done = reported("a run", cwd=exported)
    assert done.returncode == 0, done.stderr
    assert done.stdout == wording
    assert report.stat().st_mtime_ns > before


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "BK-DISK-FULL"),
        (errno.EACCES, "BK-FILE-PERMISSION"),
        (errno.EROFS, "BK-FILE-PERMISSION"),
        (errno.ENOENT, "BK-FILE-NOT-FOUND"),
        (errno.ENOTDIR, "BK-FILE-EXISTS"),
    ],
)
def test_report_names_cause_of_failed_write(exported, number, code):
    with mock.patch("buckeye.ui.export.export", side_effect=OSError(number, os.strerror(number))):
        done = reported("a run", "--out", "other.html", cwd=exported)
    assert done.returncode == (1 if code == "BK-DISK-FULL" else 2)
    assert done.stderr.splitlines()[-1] == f"more: buckeye explain {code}"


def test_what_cannot_be_reported(exported, tmp_path, wording):
    (tmp_path / "file").write_text("mine")
    for words in (
        (exported / "a run", "--out", "file"),
        (exported / "a run", "--out", "file/run.html"),
        (made_run(tmp_path / "empty"),),
        (tmp_path / "nothing",),
    ):
        done = reported(*words, cwd=tmp_path)
        assert done.returncode == (1 if words[0].name == "empty" else 2)
        assert done.stderr == wording
    assert (tmp_path / "file").read_text() == "mine"
