"""The functions of one's own in docs/algorithms.md do what they say."""

import pytest
import torch
from tests.places import ROOT
from tests.whole.docs.blocks import blocks

from buckeye.config.losses import CustomLossConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rewards import CustomAdvantageConfig
from buckeye.envs.base import Task
from buckeye.orchestrator.advantages import Scored, batch_advantages, reward_shaping
from buckeye.trainer.losses import LossInputs, total_loss

PAGE = ROOT / "docs" / "algorithms.md"


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "\n\n".join(block.text for block in blocks(PAGE.read_text()) if block.language == "python")
    )
    return file


def scored(reward, *replies, **components):
    return Scored(
        reward=reward,
        turn_rewards=[reward],
        turn_lengths=[1],
        task=Task(id="t", messages=()),
        replies=replies,
        components=components,
    )


def test_the_loss(path):
    inputs = LossInputs(
        logprobs=torch.tensor([-1.0]),
        entropies=torch.zeros(1),
        sampler_logprobs=torch.tensor([-1.5]),
        reference_logprobs=None,
        advantages=torch.ones(1),
        sequences=torch.tensor([0]),
        staleness=torch.tensor([0]),
    )
    config = CustomLossConfig(import_path=f"{path}:power", kwargs={"exponent": 2})
    assert total_loss(inputs, config).loss.item() == pytest.approx(-torch.e)


def test_the_advantage(path):
    config = CustomAdvantageConfig(import_path=f"{path}:best_only", kwargs={"scale": 2.0})
    assert batch_advantages([[scored(1.0), scored(0.5)]], config) == [[[2.0], [0.0]]]


def test_the_shaping(path):
    config = OrchestratorConfig(reward_shaping={"function": {"import_path": f"{path}:polite"}})
    amounts = [
        reward_shaping(config).amounts(rollout)["function"]
        for rollout in (scored(1.0, "please", "so"), scored(1.0, "please", style=0.6))
    ]
    assert amounts == [0.1, 0.0]
