"""What only `--try` can tell: causes that leave the same records."""

from unittest import mock

import pytest
import torch
from packages.audit.tests.diagnosis.small_runs import ENVIRONMENT, make_model
from packages.audit.tests.tuning.here import carry_out, config_of

from buckeye import runs
from buckeye.trainer.optim.optimizer import NamedOptimizer
from buckeye_audit.diagnosis.active import still_without_a_rate
from buckeye_audit.diagnosis.facts import Facts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps of a model that has learnt nothing."""
    threads, folder = torch.get_num_threads(), tmp_path_factory.mktemp("active")
    torch.set_num_threads(1)
    env = folder / "words.py"
    env.write_text(ENVIRONMENT.format(prompt="say {number}", late=0, reward="text.count('a')"))
    config = config_of(folder / "run", make_model(folder), env, lr=1e-3, steps=2, batch=16)
    carry_out(config)
    yield config.output_dir
    torch.set_num_threads(threads)


def test_at_learning_rate_0_nothing_moves(run):
    assert list(still_without_a_rate(Facts(runs.open(run)))) == []


def test_what_moves_without_a_learning_rate_is_named(run):
    original = NamedOptimizer.step

    def decaying(self, learning_rate):
        original(self, learning_rate)
        with torch.no_grad():
            for part in self._parts:
                for group in part.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(0.999)

    with mock.patch.object(NamedOptimizer, "step", decaying):
        (found,) = still_without_a_rate(Facts(runs.open(run)))
    assert (found.name, found.confidence) == ("moves_without_rate", "sure")
    assert found.figures["change"] > 0.0
    assert f"buckeye rl replay {run} --step 0" in found.command
