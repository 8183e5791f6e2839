"""A rollout during five weight updates, from the collector to the loss of the trainer."""

import asyncio
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import Outcome, Task
from buckeye.inference.client import Generation
from buckeye.orchestrator.batch import advantages_of, make_batch
from tests.orchestrator.fakes import make_collector
from tests.trainer.rl_runs import records

VERSIONS = [0, 1, 2, 2, 3, 4, 5, 5]  # that sample the tokens of two replies
RATIOS = [1.5, 10.0, 0.5, 0.1, 1.25, 0.8, 2.0, 1.0]  # the loss keeps ratios from 0.125 to 8
REPLIES = ["abc$", "dad$"]


class Engine:
    """Engine whose weights change during replies to prompts with an S.

    A token's log-prob is that of the model, less the logarithm of its ratio.
    """

    def __init__(self, model):
        self.model, self.version, self.replies = model, 0, 0

    async def generate(self, prompt_ids, params):
        if chr(prompt_ids[2]) != "S":
            return self.answer(prompt_ids, REPLIES[0], [self.version] * 4, [1.0] * 4)
        number, self.replies = self.replies, self.replies + 1
        part = slice(4 * number, 4 * number + 4)
        while self.version < VERSIONS[part][-1]:
            await asyncio.sleep(0.001)
        return self.answer(prompt_ids, REPLIES[number], VERSIONS[part], RATIOS[part])

    def answer(self, prompt_ids, text, versions, ratios):
        ids = [*map(int, prompt_ids), *map(ord, text)]
        with torch.no_grad():
            log_p = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        exact = [float(log_p[i - 1, ids[i]]) for i in range(len(ids) - 4, len(ids))]
        logprobs = [value - math.log(ratio) for value, ratio in zip(exact, ratios, strict=True)]
        return Generation(token_ids=ids[-4:], logprobs=logprobs, versions=versions, finish_reason="stop")


class Environment:
    """Environment whose first rollout has two turns and reward 1. The others have one turn and reward 0."""

    name = "letters"

    def __init__(self):
        self.started = False

    def tasks(self, split):
        return [Task(id=str(i), messages=()) for i in range(9)]

    async def rollout(self, task, policy):
        is_first, self.started = not self.started, True
        messages = [{"role": "user", "content": "S" if is_first else "F"}]
        reply = await policy.chat(messages)
        if is_first:
            await policy.chat([*messages, reply.message, {"role": "user", "content": "more"}])
        return Outcome(reward=float(is_first))


async def collected(engine):
    """Return the batches of six steps. The trainer is never behind."""
    collector = make_collector(engine, [Environment()], [2], level=1)
    batches, config = [], OrchestratorConfig()
    async with asyncio.timeout(60):
        for step in range(6):
            engine.version = step
            collector.set_version(step)
            while step == 5 and collector.metrics()["groups/in_flight"]:
                await asyncio.sleep(0.001)
            groups = (await collector.collect(step)).groups
            batches.append(make_batch(step, groups, advantages_of(groups, config), config, state={}))
    await collector.close()
    return batches


def test_tokens_of_a_rollout_across_five_updates_have_their_own_ratios(tmp_path, train, tiny_model):
    """The learning rate is 0, so all versions have the log-probs of the model."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    batches = asyncio.run(collected(Engine(model)))
    spanning, other = batches[5].samples
    written = spanning.loss_mask
    assert bytes(spanning.token_ids.tolist()) == b"u:S$a:abc$u:more$a:dad$"
    assert np.flatnonzero(written).tolist() == [6, 7, 8, 9, 19, 20, 21, 22]
    assert spanning.versions[written].tolist() == VERSIONS
    assert set(spanning.versions[~written].tolist()) == {-1}
    assert other.versions[other.loss_mask].tolist() == [0] * 4
    assert spanning.advantages.tolist() == (0.5 * written).tolist()
    assert other.advantages.tolist() == (-0.5 * other.loss_mask).tolist()

    train(tmp_path, batches, max_steps=6, optim={"lr": 0.0})
    record = records(tmp_path)[5]
    assert record["trained_tokens"] == 12
    assert record["samples_left_out"] == 0
    assert record["ratio_mean"] == pytest.approx((17.15 + 4) / 12, rel=1e-4)
    kept = 1.5 + 0.5 + 1.25 + 0.8 + 2.0 + 1.0  # 7.05; the four tokens of the other rollout have ratio 1
    assert record["loss"] == pytest.approx(-0.5 * (kept - 4) / 12, rel=1e-4)
    assert (record["masked_low"], record["masked_high"]) == pytest.approx((1 / 12, 1 / 12))
    assert record["staleness_max"] == 5
    assert record["staleness_mean"] == pytest.approx((5 + 4 + 3 + 3 + 2 + 1 + 0 + 0 + 4 * 5) / 12)
