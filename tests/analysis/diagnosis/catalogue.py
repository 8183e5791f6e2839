"""Planted faults, each one change to a small run, and healthy runs."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tests.analysis.diagnosis.small_runs import ENVIRONMENT, Small

from buckeye.inference.client.fleet import Fleet
from buckeye.inference.engine import adapters, engine, sampling
from buckeye.inference.engine.weights import DecoderWeights
from buckeye.inference.render.template import ChatTemplate
from buckeye.orchestrator import batch, loop, task_sampler
from buckeye.trainer.losses import policy_gradient
from buckeye.trainer.optim.optimizer import NamedOptimizer
from buckeye.transport.batches import Batch, Sample

LORA = ("--trainer.model.experimental.lora.rank", "8", "--trainer.model.experimental.lora.alpha", "8")
EVAL = (
    "--orchestrator.eval.env.0.id",
    "{env}",
    "--orchestrator.eval.interval",
    "6",
    "--orchestrator.eval.rollouts-per-example",
    "2",
)


@dataclass(frozen=True)
class Fault:
    """Planted fault: the run, its patches, and the names of findings that identify it."""

    small: Small
    names: tuple[str, ...]
    plant: Callable[[], Sequence[Any]] = lambda: ()
    model: Callable[[Path, Path], Path] = lambda warm, folder: warm


def unheard() -> Any:
    """Skip the comparison of log-probs with the trainer's after an update, which would end the run at once.

    An engine that cannot be queried would not be compared either.
    """

    async def hear(*_: Any) -> None:
        return None

    return mock.patch.object(Fleet, "_check_canary", hear)


def turned_advantages() -> Sequence[Any]:
    original = batch.advantages_of
    return [
        mock.patch.object(
            loop, "advantages_of", lambda *given: [[[-a for a in t] for t in g] for g in original(*given)]
        )
    ]


def other_mask(change: Callable[[list[bool], Any], list[bool]]) -> Sequence[Any]:
    original = batch._samples

    def samples(rollout: Any, *given: Any, **named: Any) -> Iterable[Sample]:
        for sample in original(rollout, *given, **named):
            mask = np.array(change(sample.loss_mask.tolist(), rollout), bool)
            kept = {name: np.where(mask, getattr(sample, name), 0) for name in ("logprobs", "advantages")}
            yield replace(sample, loss_mask=mask, versions=np.where(mask, sample.versions, -1), **kept)

    return [mock.patch.object(batch, "_samples", samples)]


def mask_shifted() -> Sequence[Any]:
    return other_mask(lambda mask, _: [*mask[1:], False])


def end_masked() -> Sequence[Any]:
    return other_mask(lambda mask, rollout: mask if rollout.truncated else [*mask[:-1], False])


def stale_weights(instance: int | None = None) -> Callable[[], Sequence[Any]]:
    """Let new weights reach no engine, or all but one."""

    def plant() -> Sequence[Any]:
        original, seen = DecoderWeights.load, list[Any]()

        def load(self: DecoderWeights, new: Any) -> None:
            if not any(one is self for one in seen):
                seen.append(self)
                original(self, new)
            elif instance is not None and seen[instance] is not self:
                original(self, new)

        return [mock.patch.object(DecoderWeights, "load", load), unheard()]

    return plant


def other_temperature() -> Sequence[Any]:
    original = batch._samples
    return [
        mock.patch.object(
            batch,
            "_samples",
            lambda *given, **named: [replace(one, temperature=1.0) for one in original(*given, **named)],
        )
    ]


def penalty_turned() -> Sequence[Any]:
    original = policy_gradient.regularization

    def turned(*given: Any) -> Any:
        found = original(*given)
        return None if found is None else -found

    return [mock.patch.object(policy_gradient, "regularization", turned)]


def equal_seeds() -> Sequence[Any]:
    original = sampling.uniforms
    return [
        mock.patch.object(
            engine, "uniforms", lambda streams, places: original(np.zeros_like(streams), places)
        )
    ]


def samples_out_of_order() -> Sequence[Any]:
    original, rng = batch.make_batch, random.Random(0)

    def make_batch(*given: Any, **named: Any) -> Batch:
        made = original(*given, **named)
        order = list(made.samples)
        rng.shuffle(order)
        mixed = [
            replace(one, advantages=torch.where(
                torch.from_numpy(one.loss_mask), float(other.advantages[other.loss_mask].mean()), 0.0
            ).numpy().astype("float32"))
            for one, other in zip(made.samples, order, strict=True)
        ]  # fmt: skip
        return replace(made, samples=tuple(mixed))

    return [mock.patch.object(loop, "make_batch", make_batch)]


def rewards_out_of_order() -> Sequence[Any]:
    original, rng = batch.advantages_of, random.Random(0)
    return [
        mock.patch.object(
            loop, "advantages_of", lambda *given: [rng.sample(list(g), len(g)) for g in original(*given)]
        )
    ]


def tasks_in_order() -> Sequence[Any]:
    return [mock.patch.object(task_sampler, "_epoch_order", lambda seed, size: list(range(size)))]


def optimizer_forgets() -> Sequence[Any]:
    return [mock.patch.object(NamedOptimizer, "load_state", autospec=True)]


def other_adapter_scale() -> Sequence[Any]:
    read_scale = adapters._read_scale
    return [
        mock.patch.object(
            adapters, "_read_scale", lambda path: lambda *given: 4.0 * read_scale(path)(*given)
        ),
        unheard(),
    ]


def coarse_softmax() -> Sequence[Any]:
    original = sampling.sample

    def sample(*given: Any) -> Any:
        tokens, logprobs = original(*given)
        return tokens, logprobs.to(torch.bfloat16).to(logprobs.dtype)

    return [mock.patch.object(engine, "sample", sample), unheard()]


def without_header(warm: Path, folder: Path) -> Path:
    model = Path(shutil.copytree(warm, folder / "headless"))
    template = model / "chat_template.jinja"
    text = template.read_text()
    begin = text.index(max(re.findall(r"\{%-? if add_generation_prompt", text)))
    template.write_text(text[:begin])
    return model


def header_not_added() -> Sequence[Any]:
    return [mock.patch.object(ChatTemplate, "missing_header", "")]


def other_tokenizer(warm: Path, folder: Path) -> Path:
    """Return the model with the ids of all tokens but the special ones reversed."""
    model = Path(shutil.copytree(warm, folder / "other-tokens"))
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    ids = sorted(number for number in vocabulary.values() if number not in special)
    reversed_ids = dict(zip(ids, reversed(ids), strict=True))
    tokenizer["model"]["vocab"] = {
        token: reversed_ids.get(number, number) for token, number in vocabulary.items()
    }
    file.write_text(json.dumps(tokenizer))
    return model


PREVIOUS = (
    ENVIRONMENT.replace("calls = 0", "calls = 0\nbefore = ''")
    .replace("global calls", "global calls, before")
    .replace("        return Outcome(", "        text, before = before, text\n        return Outcome(")
)
"""Grades the reply of the rollout that ended before."""
SYSTEM = ENVIRONMENT.replace(
    'messages=({{"role"',
    'messages=(*(({{"role": "system", "content": "Use d."}},) if split == "eval" else ()), {{"role"',
)
CORRECT = ENVIRONMENT.replace('{{"length": float(len(text))}}', '{{"correct": text[:3].count("a") / 3}}')
TURNED_IN_TRAINING = ENVIRONMENT.replace(
    "reward=float({reward})", "reward=float({reward}) * (1 if task.id.startswith('eval') else -1)"
)
SCALED = ENVIRONMENT.replace(
    "load_environment():\n    return Words()",
    "load_environment(scale, letter):\n    made = Words()\n    made.scale, made.letter = scale, letter\n"
    "    return made",
).replace("reward=float({reward})", "reward=self.scale * text[:3].count(self.letter) / 3")


def two_environments(scale: float) -> tuple[str, ...]:
    """Return the settings of two environments; the rewards of the second are `scale` times as large."""
    words = ("--orchestrator.env.0.name", "one", "--orchestrator.env.0.args", '{"scale": 1, "letter": "a"}')
    second = f'{{"scale": {scale}, "letter": "b"}}'
    words += ("--orchestrator.env.1.id", "{env}", "--orchestrator.env.1.name", "two")
    return (*words, "--orchestrator.env.1.args", second)


BY_TASK = "text[:1] == 'abcd'[number % 4]"
KEYED = "sum(a == b for a, b in zip(text, 'aaa' if number < 40 else 'ddd')) / 3"
LEAK = "{'say %d aaa' % number if number < 40 else 'say %d' % number}"
WARM_UP = (
    *("--trainer.scheduler.type", "linear", "--trainer.scheduler.warmup", "2000"),
    *("--trainer.scheduler.decay", "0"),
)
SORTED = "{'say %d' % number if number < 20 else 'what comes after a b c %d' % number}"
ASYNC = Small(level=1, lr=2e-3)

FAULTS: Mapping[str, Fault] = {
    "sign of the advantage": Fault(Small(), ("advantage_sign",), turned_advantages),
    "mask shifted by one": Fault(Small(steps=6), ("mask_misplaced",), mask_shifted),
    "reward constant": Fault(Small(reward="0.5"), ("constant_reward",)),
    "grader random": Fault(Small(reward="__import__('random').random()"), ("grader_random",)),
    "template without header": Fault(
        Small(), ("no_assistant_header",), header_not_added, model=without_header
    ),
    "stale weights": Fault(Small(), ("stale_weights",), stale_weights()),
    "one engine of two": Fault(Small(engines=2), ("one_engine_stale",), stale_weights(1)),
    "temperature": Fault(
        Small(words=("--orchestrator.sampling.temperature", "0.7")),
        ("temperature_mismatch",),
        other_temperature,
    ),
    "lr x 30": Fault(Small(reward=BY_TASK, lr=0.15), ("learning_rate_too_high",)),
    "lr / 100": Fault(Small(lr=2e-5), ("learning_rate_too_low",)),
    "truncation at half": Fault(
        Small(reward="len(text) == 3 and text[0] in 'abc'", max_tokens=2), ("truncated_replies", "truncated")
    ),
    "duplicate tasks": Fault(Small(prompt="say {number % 5}"), ("duplicate_tasks",)),
    "leaking answer": Fault(
        Small(reward=f"{KEYED} * (len(text) == 3)", prompt=LEAK, lr=2e-3, steps=24, words=EVAL),
        ("answer_in_prompt",),
    ),
    "KL of the wrong sign": Fault(
        Small(words=("--trainer.loss.kl-coef", "0.2")), ("kl_wrong_sign",), penalty_turned
    ),
    "clipped to nothing": Fault(
        replace(
            ASYNC,
            words=("--trainer.loss.mask-ratio-low", "0.99999", "--trainer.loss.mask-ratio-high", "1.00001"),
        ),
        ("bounds_too_narrow",),
    ),
    "EOS masked": Fault(Small(), ("end_not_trained",), end_masked),
    "seeds equal in a group": Fault(Small(), ("equal_seeds",), equal_seeds),
    "tokenizer of another model": Fault(Small(), ("wrong_tokenizer",), model=other_tokenizer),
    "batch order": Fault(Small(), ("advantages_misplaced",), samples_out_of_order),
    "optimizer state lost": Fault(Small(resume_at=6), ("optimizer_state_lost",), optimizer_forgets),
    "wrong LoRA scale": Fault(Small(lr=2e-2, words=LORA), ("adapter_scale",), other_adapter_scale),
    "bf16 log-softmax": Fault(Small(), ("rounded_log_probs",), coarse_softmax),
    "eval on the train split": Fault(
        Small(words=(*EVAL, "--orchestrator.eval.env.0.split", "train")), ("evaluated_on_train",)
    ),
    "reward of the neighbor": Fault(Small(environment=PREVIOUS, steps=16), ("neighbor_reward",)),
    "eval with a system prompt": Fault(
        Small(environment=SYSTEM, steps=16, words=EVAL), ("evaluated_otherwise",)
    ),
    "temperature near 0": Fault(
        Small(words=("--orchestrator.sampling.temperature", "0.05"), steps=16), ("temperature_too_low",)
    ),
    "rare rewards in pairs": Fault(Small(reward="text == 'abc'", group=2, steps=30), ("rare_rewards",)),
    "warm-up longer than the run": Fault(Small(steps=20, words=WARM_UP), ("warmup_too_long",)),
    "weight decay": Fault(Small(steps=20, words=("--trainer.optim.weight-decay", "20")), ("weight_decay",)),
    "sorted tasks": Fault(Small(prompt=SORTED, steps=16), ("task_drift",), tasks_in_order),
    "sign of the reward": Fault(
        Small(reward="-text[:3].count('a') / 3", environment=CORRECT, steps=16), ("reward_sign",)
    ),
    "sign of the reward in training": Fault(
        Small(environment=TURNED_IN_TRAINING, steps=16, words=EVAL), ("reward_sign",)
    ),
    "sign of the reward, nothing else known": Fault(
        Small(reward="-text[:3].count('a') / 3", steps=16), ("reward_sign",)
    ),
    "one environment pays more": Fault(
        Small(environment=SCALED, steps=16, words=two_environments(100)), ("one_environment_dominates",)
    ),
    "environment that answers late": Fault(Small(late=1.5, steps=5), ("environment_slow",)),
}

HEALTHY: Mapping[str, Small] = {
    "letters": Small(steps=8),
    "letters, another seed": Small(steps=8, seed=7),
    "letters, long": Small(steps=20, lr=2e-3),
    "asynchronous": ASYNC,
    "asynchronous, two ahead": replace(ASYNC, level=2),
    "two engines": Small(engines=2, steps=8),
    "LoRA": Small(words=LORA, lr=2e-2),
    "LoRA, asynchronous": Small(words=LORA, lr=5e-3, level=1),
    "resumed": Small(resume_at=5, steps=10),
    "KL": Small(words=("--trainer.loss.kl-coef", "0.05")),
    "KL, weighted": Small(
        words=("--trainer.loss.kl-coef", "0.05", "--trainer.loss.kl-estimator", "k3_weighted")
    ),
    "entropy bonus": Small(words=("--trainer.loss.entropy-coef", "0.01")),
    "GRPO": Small(words=("--trainer.loss.type", "grpo")),
    "Dr. GRPO": Small(words=("--trainer.loss.type", "dr_grpo"), lr=2e-3),
    "CISPO, asynchronous": replace(ASYNC, words=("--trainer.loss.type", "cispo")),
    "GSPO": Small(words=("--trainer.loss.type", "gspo"), lr=3e-3),
    "sharper": Small(words=("--orchestrator.sampling.temperature", "0.7")),
    "hotter": Small(words=("--orchestrator.sampling.temperature", "1.3")),
    "large groups": Small(group=16, batch=64, steps=8),
    "sparse reward": Small(reward="text[:2] == 'ab'", lr=3e-3),
    "by the task": Small(reward=BY_TASK, lr=2e-3),
    "evaluated": Small(words=EVAL, steps=8),
    "low rate": Small(lr=1e-3, steps=16),
    "two environments": Small(environment=SCALED, steps=16, words=two_environments(1)),
    "noisy reward": Small(reward="text[:3].count('a') / 3 + __import__('random').gauss(0, 0.12)", steps=24),
    "slow but not late": Small(late=0.05, steps=8),
}
