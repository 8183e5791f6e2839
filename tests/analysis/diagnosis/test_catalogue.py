"""Faults planted in small complete runs are named first, and healthy runs have no findings."""

import pytest
from tests.analysis.diagnosis.catalogue import FAULTS, HEALTHY
from tests.analysis.diagnosis.small_runs import play

from buckeye.analysis.diagnosis.diagnose import diagnose

pytestmark = pytest.mark.slow


def accused(run):
    return [one.name for one in diagnose(run).findings if one.confidence != "possible"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_first(tmp_path, warm, name):
    fault = FAULTS[name]
    run = play(tmp_path / "run", fault.model(warm, tmp_path), fault.small, fault.plant())
    tests = "wrong_tokenizer" in fault.names
    found = [one.name for one in diagnose(run, tests=tests).findings]
    assert found[:1] == [next(iter(set(found[:1]) & set(fault.names)), fault.names[0])]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_not_accused(tmp_path, warm, name):
    assert accused(play(tmp_path / "run", warm, HEALTHY[name])) == []
