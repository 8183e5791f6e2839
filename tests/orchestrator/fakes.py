"""Fake engine and environment; the code between them is real."""

import asyncio
import random
from pathlib import Path

from buckeye.config.environments import EnvPauseConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import Outcome, Task
from buckeye.inference.client import Generation, SamplingParams
from buckeye.inference.render import Conversation
from buckeye.orchestrator.collector import GroupCollector
from buckeye.orchestrator.environments import NamedEnvironment, RolloutSettings
from buckeye.orchestrator.pauses import EnvironmentPauses
from buckeye.orchestrator.policy import RecordingPolicy
from buckeye.orchestrator.rollout_runner import RecordingRolloutRunner
from buckeye.orchestrator.task_sampler import TaskSampler
from tests.waiting import HANG


class LetterRenderer:
    """Renderer with one token per character and single characters as turn markers."""

    stop_token_ids = (ord("$"),)
    vocab_size = 0x110000

    def __init__(self, rewrites_history=False):
        self.rewrites_history = rewrites_history

    def render(self, messages, tools=()):
        return _conversation(self.prompt_text(messages), messages, tools)

    def prompt_text(self, messages, tools=()):
        return "".join(f"{m['role'][0]}:{m['content']}$" for m in messages) + "a:"

    def extend(self, conversation, sampled_ids, messages, tools=(), *, reply=None):
        known = conversation.text + "".join(map(chr, sampled_ids))
        whole = self.render(messages).text
        if self.rewrites_history or not whole.startswith(known):
            return None
        return _conversation(whole, messages, tools)

    def parse(self, conversation, sampled_ids, text=None):
        return {"role": "assistant", "content": self.decode(sampled_ids).removesuffix("$")}

    def parse_text(self, conversation, text):
        return {"role": "assistant", "content": text}

    def decode(self, ids):
        return "".join(map(chr, ids))

    def encode(self, text):
        return [ord(c) for c in text]

    encode_prompt = encode

    def token_text(self, token_id):
        return chr(token_id)


def _conversation(text, messages, tools):
    ids = [ord(c) for c in text]
    return Conversation(ids=ids, text=text, messages=tuple(messages), tools=tuple(tools))


def make_policy(engine=None, renderer=None, *, seq_len=2000, seed=3, **params):
    """Return a policy that replies with letters, one token per character."""
    return RecordingPolicy(
        sampler=engine or FakeEngine(),
        renderer=renderer or LetterRenderer(),
        params=SamplingParams(**({"max_tokens": 8} | params)),
        seq_len=seq_len,
        seed=seed,
    )


def make_runner(engine, **changes):
    """Return a rollout runner on a fake engine."""
    options = {"renderer": LetterRenderer(), "params": SamplingParams(max_tokens=8), "seq_len": 64}
    options |= {"seed": 0, "timeout": HANG, "retries": 0}
    return RecordingRolloutRunner(sampler=engine, **(options | changes))


def make_collector(
    engine, environments, sizes, *, level=1, deterministic=None, retries=0, state=None, pauses=None, **changes
):
    """Return a collector of groups of these sizes."""
    options = {
        "batch_size": sum(sizes),
        "rollouts_per_example": sizes[0],
        "max_async_level": level,
        "max_off_policy_steps": 8,
        "oversampling_factor": 1.0,
        "max_empty_batches": 50,
        "weights_timeout": HANG,
    }
    options |= changes
    others = {"deterministic": deterministic is not None}
    if "version_in_evaluation" in options:
        others["version_in_evaluation"] = options.pop("version_in_evaluation")
    named = [
        NamedEnvironment(name=env.name, environment=env, rollout_settings=RolloutSettings(group_size=size))
        for env, size in zip(environments, sizes, strict=True)
    ]
    return GroupCollector(
        TaskSampler(named, seed=1),
        make_runner(deterministic or engine, seed=7, retries=retries),
        OrchestratorConfig().model_copy(update=options),
        pauses or EnvironmentPauses([env.name for env in environments], EnvPauseConfig(), Path("run")),
        state=dict(state or {}),
        **others,
    )


class FakeEngine:
    """Engine that replies with random letters determined by the seed, and records its requests."""

    def __init__(self, version=0, delay=0.0):
        self.version = version
        self.delay = delay
        self.calls = []
        self.waves = []

    def _answer(self, seed, max_tokens):
        rng = random.Random(seed)
        ids = [ord(rng.choice("abcd")) for _ in range(min(3, max_tokens - 1))] + [ord("$")]
        n = len(ids)
        return Generation(
            token_ids=ids, logprobs=[-0.5] * n, versions=[self.version] * n, finish_reason="stop"
        )

    async def generate(self, prompt_ids, params):
        self.calls.append((tuple(prompt_ids), params))
        await asyncio.sleep(self.delay)
        return self._answer(params.seed, params.max_tokens)

    async def generate_batch(self, prompts, params):
        self.waves.append((tuple(map(tuple, prompts)), params))
        await asyncio.sleep(self.delay)
        return [self._answer(params.seed + i, params.max_tokens) for i in range(len(prompts))]


class LetterEnvironment:
    """Environment of `turns` turns with reward 1 if the reply starts with the requested letter.

    `fail` makes attempts fail.
    """

    def __init__(self, name="letters", size=10, turns=1, fail=lambda task, attempt: False, sleep=0.0):
        self.name = name
        self.turns = turns
        self.fail = fail
        self.sleep = sleep
        self.attempts = {}
        self._tasks = [
            Task(id=f"{name}-{i}", messages=({"role": "user", "content": "abcd"[i % 4]},))
            for i in range(size)
        ]

    def tasks(self, split):
        return self._tasks

    async def rollout(self, task, policy):
        attempt = self.attempts[task.id] = self.attempts.get(task.id, 0) + 1
        if self.fail(task, attempt):
            raise RuntimeError("the environment broke")
        messages = list(task.messages)
        for _ in range(self.turns):
            reply = await policy.chat(messages)
            messages += [reply.message, {"role": "user", "content": "more"}]
        await asyncio.sleep(self.sleep)
        return Outcome(reward=float(reply.text.startswith(task.messages[0]["content"])))
