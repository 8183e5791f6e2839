"""What docs/workers.md shows is accepted, and its tables are complete."""

import re
import tomllib
from typing import get_args

from tests.places import ROOT

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import Boundary
from buckeye.envs.settings import Isolation

from .blocks import blocks

PAGE = (ROOT / "docs" / "workers.md").read_text(encoding="utf-8")


def test_the_settings_are_accepted():
    (settings,) = [tomllib.loads(block.text) for block in blocks(PAGE) if block.language == "toml"]
    (env,) = OrchestratorConfig(**settings).env
    assert (env.isolation, env.workers, env.max_memory_gb) == ("process", 2, 8)
    assert env.variables == ["SEARCH_API_KEY"]


def test_every_boundary_and_isolation_is_explained():
    for name in get_args(Boundary):
        assert f"\n| `{name}` |" in PAGE, name
    assert set(re.findall(r'^\| `"(\w+)"` \|', PAGE, re.M)) == set(get_args(Isolation))
