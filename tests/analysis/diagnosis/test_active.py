"""Causes that leave the same records, which only `--try` can distinguish."""

from unittest import mock

import pytest
import torch
from tests.analysis.diagnosis.small_runs import ENVIRONMENT, make_model
from tests.setup.tuning.here import carry_out, config_of

from buckeye import runs
from buckeye.analysis.diagnosis.active_tests import train_at_zero_rate
from buckeye.analysis.diagnosis.diagnose import diagnose
from buckeye.analysis.diagnosis.facts import DiagnosisFacts
from buckeye.trainer.optim.optimizer import NamedOptimizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps of an untrained model."""
    threads, folder = torch.get_num_threads(), tmp_path_factory.mktemp("active")
    torch.set_num_threads(1)
    env = folder / "words.py"
    env.write_text(ENVIRONMENT.format(prompt="say {number}", late=0, reward="text.count('a')"))
    config = config_of(folder / "run", make_model(folder), env, lr=1e-3, steps=2, batch=16)
    carry_out(config)
    yield config.output_dir
    torch.set_num_threads(threads)


def test_no_test_accuses_a_healthy_run(tmp_path, warm):
    """Its model was trained on replies only, and gives prompts less than chance probability."""
    env = tmp_path / "words.py"
    env.write_text(ENVIRONMENT.format(prompt="say {number}", late=0, reward="text[:3].count('a') / 3"))
    config = config_of(tmp_path / "run", warm, env, lr=5e-3, steps=12)
    carry_out(config)
    done = diagnose(config.output_dir, tests=True)
    assert done.cause is None
    assert "wrong_tokenizer" not in [finding.name for finding in done.findings]


def test_at_learning_rate_0_nothing_moves(run):
    assert list(train_at_zero_rate(DiagnosisFacts(runs.open(run)))) == []


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
        (found,) = train_at_zero_rate(DiagnosisFacts(runs.open(run)))
    assert (found.name, found.confidence) == ("moves_without_rate", "sure")
    assert f"buckeye rl replay {run} --step 0" in found.command
