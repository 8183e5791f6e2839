"""Environments for certificates: sound kinds, or with planted faults; loaded by its path."""

import asyncio
import contextlib
import itertools
import os
import random
import re
import subprocess
import tempfile
import threading
import time

from buckeye.envs.base import Outcome, Probe, Task
from buckeye.envs.single_turn import SingleTurnEnvironment

COUNTER = itertools.count()
KEPT = []
TAG = re.compile(r"<answer>([^<]*)</answer>")


def make(split, index, fault, kind):
    left, right = (
        index * 37 % 800 + 100,
        index * 53 % 800 + (100 if split == "train" or fault == "overlap" else 1000),
    )
    shown = f" (It is {left + right}.)" if fault == "answer shown" else ""
    question = f"What is {left} + {right}?{shown} First <think>...</think>, then <answer>...</answer>."
    return Task(
        id=f"{split}-{index}",
        messages=({"role": "user", "content": question},),
        data={} if kind == "turns" else {"accept": (str(left + right),)},
    )


class Faulty(SingleTurnEnvironment):
    def __init__(self, faults, kind):
        self.faults, self.kind = faults, kind
        self.remembered = {}
        splits = ("train",) if kind == "train only" else ("train", "eval")
        fault = next(iter(faults), "")
        super().__init__(
            "faulty", {split: [make(split, i, fault, kind) for i in range(60)] for split in splits}
        )

    def probes(self):
        if self.kind in ("no probes", "turns"):
            return []
        task = self.tasks("train")[0]
        right = f"<think>so</think><answer>{task.data['accept'][0]}</answer>"
        return [Probe(name="right", task=task, reply=right, low=0.5, high=1.0)]

    async def rollout(self, task, policy):
        if "cancel" in self.faults:
            for _ in range(100):  # a loop of retries that lasts longer than the check waits
                try:
                    return self.grade(task, await policy.chat(task.messages))
                except BaseException:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(0.1)
        messages = list(task.messages)
        if "counter" in self.faults:
            messages[0] = {"role": "user", "content": f"{messages[0]['content']} Session {next(COUNTER)}."}
        if self.kind == "clock shown":
            messages[0] = {"role": "user", "content": f"It is {time.time():.6f}. {messages[0]['content']}"}
        if self.kind == "turns":
            rng = random.Random(task.id)
            for _ in range(3):
                reply = await policy.chat(messages)
                messages += [reply.message, {"role": "user", "content": f"Try [{rng.randrange(9)}] or [3]."}]
            return Outcome(reward=0.0, components={"turns": 3.0}, stop_reason="over")
        if self.kind == "slow":
            await asyncio.sleep(0.02)
        if self.kind == "busy":
            sum(i * i for i in range(200_000))
        if "blocks" in self.faults:
            time.sleep(0.05)
        reply = await policy.chat(messages)
        if self.kind == "child":
            subprocess.run(["true"], check=True)
        if self.kind == "files":
            with tempfile.NamedTemporaryFile() as file:
                file.write(b"x" * 10_000)
        if self.kind == "cache":
            self.remembered[task.id] = "x" * 50_000
        if "file" in self.faults:
            KEPT.append(open(os.devnull))  # noqa: SIM115
        if "temporary file" in self.faults:
            os.close(tempfile.mkstemp()[0])
        if "memory" in self.faults:
            KEPT.append(os.urandom(100_000))
        if "thread" in self.faults:
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        if "task" in self.faults:
            KEPT.append(asyncio.ensure_future(asyncio.sleep(600)))
        if "zombie" in self.faults:
            KEPT.append(subprocess.Popen(["true"]))
        if self.kind == "background task":
            task_in_background = asyncio.ensure_future(asyncio.sleep(0.01))
            KEPT.append(task_in_background)
            task_in_background.add_done_callback(KEPT.remove)
        if "child" in self.faults:
            KEPT.append(subprocess.Popen(["sleep", "600"]))
        return self.grade(task, reply)

    def grade(self, task, reply):
        if "pattern" in self.faults:
            re.match(r"(a+)+$", reply.text)
        answers = TAG.findall(reply.text)
        right = float(answers == [task.data["accept"][0]])
        components = {"right": right, "tag": float(bool(answers))} if self.kind != "no components" else {}
        reward = right
        if "random" in self.faults:
            reward = random.random()
        if "clock" in self.faults:
            reward = right * (1.0 if int(time.time()) % 2 else 0.5)
        if "component" in self.faults:
            components = {"right": right} | ({"brief": 0.2} if "<think>" in reply.text else {})
            reward = sum(components.values()) / len(components)
        if "range" in self.faults:
            reward = 1.5 * right
        if self.kind == "penalty":
            components |= {"long": -0.1} if len(reply.text) > 20 else {}
            reward = max(0.0, right - 0.1 * ("long" in components))
        return Outcome(reward=reward, components=components)


def load_environment(faults=(), kind=""):
    faults = [faults] if isinstance(faults, str) else list(faults)
    return Faulty(faults, kind)
