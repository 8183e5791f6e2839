"""The environment check of `--try`."""

from types import SimpleNamespace

import pytest

from buckeye.analysis.diagnosis.active_tests import check_environments
from buckeye.errors import UsageError

pytestmark = pytest.mark.slow

JUDGED = """
import os

from buckeye.envs.base import Outcome, Task


class Judged:
    name = "judged"

    def tasks(self, split):
        names = [f"{split}-{n}" for n in range(100)]
        return [Task(id=name, messages=({"role": "user", "content": name[::-1]},)) for name in names]

    async def rollout(self, task, policy):
        reply = await policy.chat(task.messages)
        return Outcome(reward=float(reply.text == task.id))


def load_environment():
    os.environ["JUDGE_API_KEY"]
    return Judged()
"""


def findings_with(path, variables):
    """Return the names of the findings on an environment with these `variables`."""
    environment = {"id": str(path), "args": {}, "variables": variables}
    facts = SimpleNamespace(
        run=SimpleNamespace(setting=lambda _: [environment]), finding=lambda name, *_, **__: name
    )
    return list(check_environments(facts))


def test_environment_gets_the_variables_of_its_run(tmp_path, monkeypatch):
    path = tmp_path / "judged.py"
    path.write_text(JUDGED)
    (tmp_path / ".env").write_text("JUDGE_API_KEY=secret")
    (tmp_path / ".env").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        findings_with(path, [])
    assert error.value.code == "BK-ENV-LOAD"
    assert findings_with(path, ["JUDGE_API_KEY"]) == []
