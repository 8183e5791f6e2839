"""Faults planted in the code that replays a run, each from some step on, and code that is unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest import mock

import pytest
from tests.analysis.diagnosis.small_runs import Small, make_model, play
from tests.command import run_here

from buckeye.analysis.replay import step as replayed
from buckeye.base.storage import write_file
from buckeye.config.load import load_config, to_json
from buckeye.config.rl import RLConfig
from buckeye.trainer import batch_loss, learner
from buckeye.trainer.losses import policy_gradient
from buckeye.trainer.model.policy import Policy
from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from buckeye.trainer.optim.optimizer import NamedOptimizer
from buckeye.trainer.rl import RLTrainer

STEPS = 20
TOOLS = '''
"""Several turns with a tool; some rollouts fail, some have their history rewritten."""

import asyncio
import random

from buckeye.envs.base import Outcome, Task

COUNT = {{"type": "function", "function": {{"name": "count", "description": "Count letters.", "parameters":
    {{"type": "object", "properties": {{"of": {{"type": "string"}}}}}}}}}}
calls = 0


class Words:
    name = "words"

    def tasks(self, split):
        prompts = [{{"role": "user", "content": f"say {{n}}"}} for n in range(40)]
        return [Task(id=f"{{split}}-{{n}}", messages=(prompt,)) for n, prompt in enumerate(prompts)]

    async def rollout(self, task, policy):
        global calls
        calls += 1
        own, number = calls, int(task.id.rpartition("-")[2])
        messages, said = list(task.messages), ""
        for turn in range(3):
            await asyncio.sleep(random.random() * {late})
            reply = await policy.chat(messages, tools=(COUNT,))
            said += reply.text
            if own % 9 == 0 and turn == 1:
                raise RuntimeError("it broke")
            role = "user" if turn else "tool"
            messages = [*messages, dict(reply.message), {{"role": role, "content": f"say {{turn}}"}}]
            if number % 5 == 0 and turn == 1:
                messages = messages[2:]
        return Outcome(reward={reward}, components={{"length": float(len(said))}})


def load_environment():
    return Words()
'''


class Now:
    """Which step is computed: a fault that begins later asks."""

    step = 0


@dataclass(frozen=True)
class Fault:
    """What is changed of the code from a step on, and the stage that it is of."""

    stage: str
    first: int
    owner: object
    name: str
    change: Callable

    def patch(self):
        original = getattr(self.owner, self.name)

        def changed(*given, **named):
            if Now.step < self.first:
                return original(*given, **named)
            return self.change(original, *given, **named)

        return mock.patch.object(self.owner, self.name, changed)


def coarse(made, *given):
    logprobs, entropies = made(*given)
    return logprobs.bfloat16().float(), entropies


def scaled_loss(made, *given):
    sums = made(*given)
    return replace(sums, loss=1.01 * sums.loss)


def narrow(made, inputs, config):
    return made(inputs, config.model_copy(update={"mask_ratio_high": 1.0005}))


def penalty_turned(made, *given):
    found = made(*given)
    return None if found is None else -found


def scaled_gradient(made, trainer, *given):
    found = made(trainer, *given)
    for parameter in trainer.learner.policy.trainable.values():
        parameter.grad.mul_(1.01)
    return found


def of_groups(**changed):
    """The optimizer with other settings."""

    def change(made, optimizer, *given):
        for group in (group for part in optimizer._parts for group in part.param_groups):
            group.update(changed)
        return made(optimizer, *given)

    return change


FAULTS = {
    "coarse log-softmax": Fault("log-probs", 4, Policy, "token_logprobs", coarse),
    "loss scaled": Fault("loss", 9, batch_loss, "total_loss", scaled_loss),
    "bounds of the ratio": Fault("loss", 6, batch_loss, "total_loss", narrow),
    "KL of the wrong sign": Fault("loss", 5, policy_gradient, "regularization", penalty_turned),
    "gradient scaled": Fault("gradient", 8, RLTrainer, "_backward", scaled_gradient),
    "gradient clipped": Fault(
        "weights", 10, learner, "clip_gradients", lambda made, grads, norm, limit: made(grads, norm, 0.01)
    ),
    "beta of the optimizer": Fault("weights", 12, NamedOptimizer, "step", of_groups(betas=(0.8, 0.999))),
    "weight decay": Fault("weights", 13, NamedOptimizer, "step", of_groups(weight_decay=0.5)),
    "learning rate's schedule": Fault(
        "weights", 19, learner, "learning_rate", lambda made, *given, **named: 1.1 * made(*given, **named)
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the asynchronous runs `plain`, with a KL penalty, and `tools`, of several turns."""
    root = tmp_path_factory.mktemp("runs")
    words = (
        "say 0 1 2 3 4 5 6 7 8 9 a b c d function parameters name type properties string object tools call"
    )
    size = TinySize(vocab_size=310, layers=1, hidden=64, max_length=1024)
    make_tiny_model(root / "long", texts=[words] * 20, size=size, seed=0)
    kept = ("--ckpt.interval", "5", "--trainer.trained.record-order", "true")
    plain = Small(
        "len(text) % 5 / 4", steps=STEPS, level=1, lr=2e-3, words=(*kept, "--trainer.loss.kl-coef", "0.1")
    )
    longer = ("--orchestrator.seq-len", "1000", "--trainer.seq-len", "1000")
    tools = replace(plain, reward="len(said) % 5 / 4", late=0.02, environment=TOOLS, words=(*kept, *longer))
    for name, model, small in (("plain", make_model(root), plain), ("tools", root / "long", tools)):
        run = play(root / name, model, small)
        config = load_config(RLConfig, ["@", str(run / "configs/rl.json")])
        write_file(run / "configs/trainer.json", to_json(config.trainer))
        write_file(run / "configs/orchestrator.json", to_json(config.orchestrator))
    return root


@pytest.fixture(autouse=True)
def _now():
    """Note each step before it is computed."""
    again = replayed._again

    def tell(trainer, kept, step):
        Now.step = step
        return again(trainer, kept, step)

    with mock.patch.object(replayed, "_again", tell):
        yield
    Now.step = 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_with_its_step_and_stage(runs, name):
    fault = FAULTS[name]
    with ExitStack() as stack:
        stack.enter_context(fault.patch())
        done = run_here("rl", "replay", "plain", "--all", "--json", cwd=runs)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)["first_difference"]
    assert (done.returncode, found["step"], found["stage"]) == (1, fault.first, fault.stage)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["plain", "tools"])
def test_unchanged_code_repeats_twenty_steps(runs, run):
    done = run_here("rl", "replay", run, "--all", cwd=runs)
    assert (done.returncode, done.stdout.startswith("20 steps (0 to 19) from ")) == (0, True)
    assert done.stdout.endswith(": the same to the last bit.\n")
