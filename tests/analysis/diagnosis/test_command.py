"""`rl diagnose` as users see it, and the message at the end of a run."""

import json
import logging

import pytest
from tests.analysis.diagnosis.made_runs import Made, make
from tests.command import run_here

from buckeye.analysis.diagnosis.chain import CHAIN
from buckeye.analysis.diagnosis.diagnose import report_findings


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder with a run `good`, and a run `bad` whose advantages have the wrong sign."""
    root = tmp_path_factory.mktemp("runs")
    make(root / "good", Made())
    make(root / "bad", Made(advantages=lambda advantages, rng: -advantages))
    return root


def test_it_says_what_why_and_what_to_do(runs):
    done = run_here("rl", "diagnose", "bad", cwd=runs)
    assert (done.returncode, done.stderr) == (1, "")
    chain, broken, *_ = done.stdout.split("\n\n")
    states = [line.split("  ")[2].strip() for line in chain.splitlines()]
    assert [(at, state) for at, state in enumerate(states, 1) if state == "BROKEN"] == [(6, "BROKEN")]
    head, cause, fix, evidence = broken.splitlines()
    assert head.startswith("First broken link: advantages_misplaced (sure, steps 0 to 9): ")
    assert cause.startswith("  cause     advantages belong to other rollouts of the batch")
    assert fix.startswith(
        "  fix       return the advantages of your own function in the order of the rollouts"
    )
    assert "buckeye rl rollouts bad --step 0 --group 0 --json" in evidence
    good = run_here("rl", "diagnose", "good", cwd=runs)
    assert good.returncode == 0
    assert "\n\nNo broken link.\n" in good.stdout
    assert "BROKEN" not in good.stdout


def test_json(runs):
    done = run_here("rl", "diagnose", "bad", "--json", "--step", "4", cwd=runs)
    found = json.loads(done.stdout)
    assert found["not_looked_at"] == []
    (first, *_) = found["findings"]
    assert (first["name"], first["confidence"], first["until"]) == ("advantages_misplaced", "sure", 4)
    assert first["evidence"][0]["command"] == first["command"]
    assert found["cause"] == "advantages_misplaced"
    assert [link["name"] for link in found["links"]] == list(CHAIN)
    assert [link["name"] for link in found["links"] if link["state"] == "broken"] == ["advantage and loss"]


def test_output_has_whole_measurements(runs):
    found = json.loads(run_here("rl", "diagnose", "good", "--json", cwd=runs).stdout)
    measured = ["; ".join(link["measured"]) for link in found["links"]]
    lines = run_here("rl", "diagnose", "good", cwd=runs).stdout.splitlines()
    assert max(map(len, measured)) > 100
    assert all(line.endswith(text) for line, text in zip(lines, measured, strict=False))


def test_what_is_damaged_is_said(runs):
    run = make(runs / "torn", Made(steps=4))
    (run / "trained" / "step_1" / "batch.safetensors").write_bytes(b"torn")
    done = run_here("rl", "diagnose", "torn", cwd=runs)
    assert "torn/trained/step_1/batch.safetensors is damaged" in done.stdout


def test_no_run(runs):
    done = run_here("rl", "diagnose", "none", cwd=runs)
    assert done.returncode == 2
    assert "no run 'none'" in done.stderr


def test_a_run_says_it_at_its_end(runs, caplog):
    with caplog.at_level(logging.WARNING):
        report_findings(runs / "good")
        assert caplog.messages == []
        report_findings(runs / "bad")
    first, last = caplog.messages
    assert first.startswith("Found (sure): 232 of 320 samples have an advantage or tokens that differ")
    assert last == f"Full diagnosis with evidence: buckeye rl diagnose {runs / 'bad'}"


def test_finding_in_the_last_lines_of_the_log_is_not_repeated(runs, caplog):
    run = make(runs / "again", Made(advantages=lambda advantages, rng: -advantages))
    log = run / "logs" / "run.log"
    log.parent.mkdir(exist_ok=True)
    with caplog.at_level(logging.WARNING):
        report_findings(run)
        found, full = caplog.messages
        log.write_text(f"WARNING {found}\n" + "step\n" * 20)
        report_findings(run)
        assert caplog.messages[2:] == [full]
        log.write_text(f"WARNING {found}\n" + "step\n" * 200)  # no longer on the screen
        report_findings(run)
        assert caplog.messages[3:] == [found, full]


def broken_check(facts):
    raise ZeroDivisionError("planted")


@pytest.fixture
def one_check_fails(monkeypatch):
    monkeypatch.setitem(CHAIN, "tasks", (broken_check, *CHAIN["tasks"]))


def test_a_check_that_fails_hides_no_other(runs, one_check_fails):
    done = run_here("rl", "diagnose", "bad", cwd=runs)
    assert (done.returncode, done.stderr) == (1, "")
    assert "\n\nFirst broken link: advantages_misplaced (sure, " in done.stdout
    said = "check broken_check failed (1 of 1 that did): ZeroDivisionError: planted. `--debug` shows where"
    assert f"not checked: {said}\n" in done.stdout
    good = run_here("rl", "diagnose", "good", cwd=runs)
    assert "\n\nNo broken link, but some checks failed.\n" in good.stdout
    found = json.loads(run_here("rl", "diagnose", "good", "--json", cwd=runs).stdout)
    assert found["failed_rules"] == {"broken_check": "ZeroDivisionError: planted"}


def test_a_check_that_fails_is_traced_with_debug(runs, one_check_fails):
    done = run_here("rl", "diagnose", "bad", "--debug", cwd=runs)
    assert done.returncode == 1
    assert 'raise ZeroDivisionError("planted")' in done.stderr


def test_a_diagnosis_that_fails_ends_nothing(runs, caplog, one_check_fails):
    with caplog.at_level(logging.INFO):
        report_findings(runs / "good")
        report_findings(runs / "none")
    failed, impossible = caplog.messages
    assert failed.startswith("Not checked: check broken_check failed")
    assert impossible.startswith("The diagnosis of the run failed: ")
