"""`buckeye env survey`: one row per environment, bounded in time, resumed."""

import json

from buckeye.evaluation.certify.survey import survey
from tests.command import run_here
from tests.places import ROOT

TOY = str(ROOT / "tests" / "envs" / "toy.py")


def test_a_survey_has_a_row_per_environment_and_resumes(tmp_path):
    done = []
    missing = "./missing.py"
    rows = survey([missing], tmp_path, [], 60.0, done.append)
    assert rows[0]["verdict"] == "not run"
    assert "the path does not exist" in rows[0]["error"]
    rows = survey([missing, TOY], tmp_path, ["--budget", "1", "--sessions", "10"], 0.1, done.append)
    assert rows[1] == {"environment": TOY, "verdict": "not run", "error": "more than 0.1 s"}
    assert done == [f"1 of 1: {missing}", f"2 of 2: {TOY}"]
    lines = (tmp_path / "survey.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    assert len((tmp_path / "survey.md").read_text().splitlines()) == 2 + 2 + 2


def test_a_library_without_a_list_is_refused():
    done = run_here("env", "survey", "nothing", cwd=".")
    assert done.returncode == 2
    assert "BK-CLI-ARGUMENT" in done.stderr
