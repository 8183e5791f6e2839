"""Toy environment, honest by default, with one defect per variant; loaded by its path."""

import base64
import hashlib
import itertools
import json
import random
import time

from buckeye.envs.base import Outcome, Probe, Task
from buckeye.envs.single_turn import SingleTurnEnvironment

LETTERS = "bcdfghjklmnpqrstvwxz"
CALLS = itertools.count()


def word(text):
    digest = hashlib.sha256(text.encode()).digest()
    return "".join(LETTERS[byte % len(LETTERS)] for byte in digest[:6])


def make(split, index, variant):
    shown = word(f"{'train' if variant in ('overlap', 'reworded') else split}/{index}")
    answer = "moon" if variant == "constant" else shown[::-1]
    prompt = f'Write "{shown}" backwards. Put only the word in <answer></answer>.'
    if variant in ("choice", "uneven choice"):
        prompt = f'Is "{shown}" a word? Put yes, no or maybe in <answer></answer>.'
        answer = ("yes", "no", "maybe")[ord(shown[0]) % 3]
        answer = "yes" if variant == "uneven choice" and index % 20 else answer
    if variant in ("number", "number shown"):
        answer = 300 + index * 7919 % 6007
        prompt = f"Find number {index} of {split} in section 3{answer}.1. Put it in <answer></answer>."
        prompt += f" (Hint: {answer:,}.0)" if variant == "number shown" else ""
    if variant == "reworded" and split == "eval":
        prompt = prompt.replace("Put only", " put  only")
    if variant == "shown":
        prompt += f" For instance {answer.upper()}!"
    if variant == "encoded":
        prompt += f" ({base64.b64encode(f'The word is {answer}'.encode()).decode()})"
    if variant == "hexadecimal":
        prompt += f" (0x{answer.encode().hex()})"
    data = {} if variant in ("letters", "no answers") else {"accept": (answer,)}
    if variant == "row sent":
        data = {"row": {"gold": answer, "level": index}}
        prompt += f" {json.dumps(data)}"
    name = "same" if variant == "one id" else f"{split}-{shown}"
    if variant == "another each time":
        name += f"-{random.random()}"
    if variant == "hash seed":
        name += f"-{hash(shown) % 10}"
    messages = ({"role": "user", "content": prompt},)
    family = "new" if variant == "new family" and split == "eval" else "reverse"
    return Task(id=name, messages=messages, data={**data, "shown": shown, "family": family, "index": index})


class Toy(SingleTurnEnvironment):
    def __init__(self, variant, size):
        self.variant = variant
        splits = {"train only": ("train",), "eval only": ("eval",)}.get(variant, ("train", "eval"))
        super().__init__("toy", {split: [make(split, i, variant) for i in range(size)] for split in splits})

    def probes(self):
        task = self.tasks(self.splits[0])[0]
        right = 0.5 if self.variant == "wrong probe" else 1.0
        answer = task.data.get("accept", (task.data["shown"][::-1],))[0]
        return [
            Probe(name="right", task=task, reply=f"<answer>{answer}</answer>", low=right, high=right),
            Probe(name="no tag", task=task, reply=str(answer), low=0.0, high=0.2),
        ]

    def grade(self, task, reply):
        said = (
            reply.text.rpartition("<answer>")[2].partition("</answer>")[0] if "<answer>" in reply.text else ""
        )
        answer = task.data["shown"][::-1]
        right = float(said in map(str, task.data.get("accept", (answer,))))
        match self.variant:
            case "echo":
                right = max(right, 0.1 * (said == task.data["shown"]))
            case "lucky":
                right = max(right, float(said == task.data["shown"] and task.data["index"] % 6 == 0))
            case "label":
                right = float(reply.text == f"Answer: {answer}")
            case "letters":
                right = 0.2 * said.count("b") / len(said) if said else 0.0
            case "dump":
                right = float({"in", "only", "the"} <= set(said.split()))
            case "dice":
                right = random.random()
            case "memory":
                return Outcome(reward=right, components={"call": float(next(CALLS))})
            case "too much":
                right *= 1.5
            case "first letter":
                right = float(said[:1] == answer[0])
            case "two answers":
                right = float(answer in said)
            case "wears off":
                right *= 1.0 if next(CALLS) < 30 else 0.5
            case "rounded":
                right *= 1 + 2e-16
            case "not a number":
                right = right or float("nan")
            case "slow":
                time.sleep(0.02)
            case "pays nothing":
                right = 0.0
            case "always raises":
                raise LookupError("no task at all")
            case "ascii":
                said.encode("ascii")
            case "raises" if not said:
                raise LookupError("no tag in the reply")
        return Outcome(reward=right)

    async def rollout(self, task, policy):
        if self.variant == "swallows":
            try:
                return await super().rollout(task, policy)
            except Exception:
                return Outcome(reward=0.0)
        if self.variant in ("feedback", "feedback shows the answer"):
            answer = task.data["accept"][0] if self.variant == "feedback shows the answer" else "wrong"
            messages = list(task.messages)
            outcome = self.grade(task, reply := await policy.chat(messages))
            if outcome.reward < 1:
                messages += [reply.message, {"role": "user", "content": f"No: {answer}. Try again."}]
                outcome = self.grade(task, await policy.chat(messages))
            return outcome
        if self.variant == "endless":
            while True:
                await policy.chat(task.messages)
        return await super().rollout(task, policy)


def load_environment(variant="honest", size=60):
    return Toy(variant, size)
