"""The Dakota environment, installed for `verifiers` before 0.4 and loaded by its full name."""

import json
import subprocess

import pytest
from tests.places import ROOT
from tests.workers.installed.test_install import Person

pytestmark = pytest.mark.slow
PROJECT = ROOT / "environments" / "dakota1890"
LOAD = "from verifiers import load_environment; load_environment('harleycooper/dakota1890'); print('loaded')"


def test_the_verification_line_runs_and_a_rollout_was_played(tmp_path):
    person = Person(tmp_path)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        del person.variables[name]
    done = person.env("install", PROJECT, seconds=1500)
    assert done.returncode == 0, done.stderr
    assert "verifiers-v0" in done.stderr
    assert "tasks       2000 in split 'train'" in done.stdout
    assert "reward      0.0" in done.stdout
    (row,) = json.loads(person.env("list", "--json").stdout)
    loaded = subprocess.run(
        [row["python"], "-c", LOAD], capture_output=True, text=True, env=person.variables, check=False
    )
    assert (loaded.returncode, loaded.stdout.splitlines()[-1:]) == (0, ["loaded"]), loaded.stderr
    assert {"verifiers==0.1.14"} <= set(row["requirements"])
