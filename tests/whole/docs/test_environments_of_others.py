"""What docs/environments-of-others.md shows is accepted as it stands, and its tables are complete."""

import re

import pytest
from tests.places import ROOT

from buckeye.config.load import load_config
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.workers.worker_side.adapters import agent, reasoning_gym, textarena, verifiers_v1

PAGE = (ROOT / "docs" / "environments-of-others.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```toml\n(.*?)^```", PAGE, re.S | re.M)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_table_is_a_configuration(tmp_path, block):
    (tmp_path / "orch.toml").write_text(block)
    (env,) = load_config(OrchestratorConfig, ["@", str(tmp_path / "orch.toml")]).env
    assert env.id in PAGE


def test_every_argument_of_ours_is_named():
    names = {
        *agent.ARGUMENTS,
        *verifiers_v1.OWN_ARGUMENTS,
        *reasoning_gym.OWN_ARGUMENTS,
        *textarena.OWN_ARGUMENTS,
    }
    assert [name for name in sorted(names) if f"`{name}`" not in PAGE] == []


def test_every_variable_of_a_program_is_named():
    endpoint = {"base_url": "http://h/v1", "root_url": "http://h", "api_key": "k", "model": "m"}
    for name in (*agent.addresses(endpoint), "BUCKEYE_TASK", "BUCKEYE_RESULT"):
        assert f"`{name}`" in PAGE
