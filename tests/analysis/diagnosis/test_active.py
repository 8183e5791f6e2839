"""Causes that leave the same records, which only `--try` can distinguish."""

import re
from unittest import mock

import pytest
import torch
from tests.analysis.diagnosis.small_runs import ENVIRONMENT, make_model
from tests.setup.tuning.here import carry_out, config_of

from buckeye import runs
from buckeye.analysis.diagnosis.active_tests import rewards_learnable, train_at_zero_rate
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


def found_of(folder, warm, reward, components="{}"):
    """Return the findings of a run with this reward, and with components given as a Python dict."""
    env = folder / "words.py"
    text = ENVIRONMENT.replace('{{"length": float(len(text))}}', "PARTS")
    text = text.format(prompt="say {number}", late=0, reward=reward).replace("PARTS", components)
    env.write_text(f"import random\n{text}")
    config = config_of(folder / "run", warm, env, lr=5e-3, steps=12)
    carry_out(config)
    return list(rewards_learnable(DiagnosisFacts(runs.open(config.output_dir))))


def test_no_test_accuses_a_healthy_run(tmp_path, warm):
    """Its model was trained on replies only, and gives prompts less than chance probability."""
    assert found_of(tmp_path, warm, A) == []
    done = diagnose(tmp_path / "run" / "out", tests=True)
    assert done.cause is None
    assert "wrong_tokenizer" not in [finding.name for finding in done.findings]


@pytest.mark.parametrize(
    "reward",
    [
        "random.random()",
        "random.random() < 0.3",
    ],
)
def test_rewards_that_teach_nothing_are_named(tmp_path, warm, reward):
    (found,) = found_of(tmp_path, warm, reward)
    assert (found.name, found.confidence) == ("rewards_teach_nothing", "possible")
    own, control = map(float, re.findall(r"([+-][\d.]+), with shuffled", found.seen))
    assert abs(own) < control / 2


@pytest.mark.parametrize(
    "reward",
    [
        "text[:3].count('a') / 3",
        "text[:1] == 'b'",
        "text[:3].count('a') / 3 + random.random()",
    ],
)
def test_rewards_that_teach_are_not_accused(tmp_path, warm, reward):
    assert found_of(tmp_path, warm, reward) == []


def test_rewards_that_do_not_differ_are_not_judged(tmp_path, warm):
    with pytest.raises(LookupError, match="only 0 groups"):
        found_of(tmp_path, warm, "1.0")


A, B = "text[:3].count('a') / 3", "text[:3].count('b') / 3"


def test_a_part_that_another_one_outweighs_is_named(tmp_path, warm):
    (found,) = found_of(tmp_path, warm, f"{A} + 0.3 * {B}", f'{{"as": {A}, "bs": {B}}}')
    assert (found.name, found.confidence) == ("component_outweighed", "possible")
    assert found.seen.index("`bs`") < found.seen.index("`as`")
    harmed, raised = map(float, re.findall(r"([+-][\d.]+), with shuffled", found.seen))
    assert harmed < 0 < raised


def test_a_component_of_the_task_alone_outweighs_nothing(tmp_path, warm):
    """A component that is equal within a group has no effect, however large it is."""
    level = "float(number % 5)"
    components = f'{{"as": {A}, "bs": {B}, "level": {level}}}'
    (found,) = found_of(tmp_path, warm, f"{A} + 0.3 * {B} + {level}", components)
    assert found.seen.index("`bs`") < found.seen.index("`as`")


@pytest.mark.parametrize(
    ("other", "weight"), [("float(text[:1] == 'a')", 0.3), (B, 0.0)], ids=["goes along", "is not paid"]
)
def test_a_component_that_is_not_outweighed_is_not_accused(tmp_path, warm, other, weight):
    assert found_of(tmp_path, warm, f"{A} + {weight} * {other}", f'{{"as": {A}, "other": {other}}}') == []


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
