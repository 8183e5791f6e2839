"""Records of synthetic runs, in seconds, of a policy that is a table of logits.

The table is sampled and trained exactly. Each setting can plant a fault in the records.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from buckeye.base.process import RunIdentity
from buckeye.transport.batches import Batch, Sample, TrainedBatch, write_batch

LETTERS, LENGTH, END, FIRST = 5, 3, 9, 10
Table = np.ndarray


@dataclass(frozen=True)
class Made:
    """Settings of the records of a run.

    `sampler` maps the tables of all versions, a version and a rollout number to the table to sample from.

    `drift` is the distance in nats that a step moves the logits. `asked` maps a task to its prompt, `line`
    changes the record of a rollout, and `draw` maps the log-probs of the sampler to those of its tokens.
    With `same_replies`, replies do not depend on the task. `dtype` is the recorded dtype of the trainer.
    """

    seed: int = 0
    steps: int = 10
    tasks: int = 12
    groups: int = 8
    size: int = 4
    level: int = 0
    drift: float = 0.05
    noise: float = 1e-6
    sampler: Callable[[list[Table], int, int], Table] = lambda tables, version, number: tables[version]
    reward: Callable[[np.ndarray, int, np.random.Generator], float] = lambda word, task, rng: float(
        word[0] < 2
    )
    grade: Callable[[float], float] = lambda reward: reward
    sampled: Callable[[np.ndarray], np.ndarray] = lambda logprobs: logprobs
    advantages: Callable[[np.ndarray, np.random.Generator], np.ndarray] = lambda advantages, rng: advantages
    mask: Callable[[np.ndarray], np.ndarray] = lambda mask: mask
    prompt: Callable[[int], int] = lambda task: task
    equal: bool = False
    same_replies: bool = False
    dtype: str = "float32"
    evaluated: tuple[int, ...] = ()
    asked: Callable[[int], str] = lambda task: f"task {task}"
    line: Callable[[dict[str, Any]], dict[str, Any]] = lambda line: line
    draw: Callable[[Table], Table] = lambda table: table
    settings: dict[str, Any] = field(default_factory=dict)


def log_softmax(table: Table) -> Table:
    shifted = table - table.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def make(run: Path, made: Made) -> Path:
    """Write the records of a run and return its directory."""
    rng = np.random.default_rng(made.seed)
    tables = [rng.normal(0, 1, (made.tasks, LENGTH, LETTERS))]
    direction = np.zeros_like(tables[0])
    direction[:, 0, :2], direction[:, 0, 2:] = 1.0, -1.0
    for _ in range(made.steps):
        tables.append(tables[-1] + made.drift * (direction + 0.3 * rng.normal(0, 1, direction.shape)))
    if made.same_replies:
        tables = [np.broadcast_to(table[:1], table.shape) for table in tables]
    (run / "rollouts").mkdir(parents=True)
    (run / "configs").mkdir()
    settings = {"trainer": {"model": {"dtype": "float32", "device": "cpu"}}, **made.settings}
    (run / "configs" / "rl.json").write_text(json.dumps(settings))
    with (run / "metrics.jsonl").open("w") as metrics:
        for step in range(made.steps):
            for process, values in _step(run, made, tables, step, rng).items():
                line = {"time": 1.7e9 + step, "process": process, "step": step, **values}
                metrics.write(json.dumps(line) + "\n")
    for task in made.evaluated:
        folder = run / "evals" / "step_0"
        folder.mkdir(parents=True, exist_ok=True)
        messages = [{"role": "user", "content": made.asked(task)}, {"role": "assistant", "content": "x"}]
        line = {"task_id": f"eval-{task}", "rollout": 0, "reward": 0.5, "messages": messages}
        with (folder / "made.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return run


def _step(run: Path, made: Made, tables: list[Table], step: int, rng: np.random.Generator) -> dict[str, Any]:
    lines, samples, trained, rewards, entropies, spread = [], [], [], [], [], 0
    version = max(0, step - made.level)
    for group in range(made.groups):
        task = int(rng.integers(made.tasks))
        asked = made.prompt(task)
        words, known = [], []
        for number in range(made.size):
            table = log_softmax(made.sampler(tables, version, group * made.size + number)[asked])
            if made.equal and words:
                word = words[0]
            else:
                word = np.array([rng.choice(LETTERS, p=np.exp(row)) for row in log_softmax(made.draw(table))])
            words.append(word)
            entropies += [*-(np.exp(table) * table).sum(-1), 0.01]
            known.append((table[range(LENGTH), word], log_softmax(tables[step][asked])[range(LENGTH), word]))
        earned = np.array([made.reward(word, asked, rng) for word in words])
        computed = earned - earned.mean()
        given = made.advantages(computed, rng)
        spread += bool(np.ptp(earned) > 0)
        rewards += list(earned)
        for number, word in enumerate(words):
            mask = made.mask(np.array([False, False, False, *[True] * (LENGTH + 1)]))
            real = np.array([False, False, False, *[True] * (LENGTH + 1)])
            sampler = np.array([0, 0, 0, *known[number][0], -0.01], np.float32)
            trainer = np.array([0, 0, 0, *known[number][1], -0.01], np.float32)
            sampler[3:] = made.sampled(sampler[3:])
            samples.append(
                Sample(
                    token_ids=np.array([1, FIRST + LETTERS + asked, 2, *(FIRST + word), END], np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask & real, sampler, np.float32(0)),
                    versions=np.where(mask & real, np.int32(version), np.int32(-1)),
                    advantages=np.where(mask, np.float32(given[number]), np.float32(0)),
                    temperature=1.0,
                )
            )
            noise = rng.normal(0, made.noise, len(mask)).astype(np.float32)
            trained.append((trainer + noise)[mask])
            said = "".join("abcde"[letter] for letter in word)
            line = {
                "group": step * made.groups + group,
                "env": "made",
                "task_id": f"train-{task}",
                "reward": earned[number],
                "components": {"grade/state": made.grade(earned[number])},
                "shaped_reward": earned[number],
                "turns": 1,
                "advantages": [float(computed[number])],
                "stop_reason": "done",
                "seconds": 1.0,
                "completion_tokens": LENGTH + 1,
                "oldest_version": version,
                "text": [f"{made.asked(asked)} {said}"],
                "messages": [
                    {"role": "user", "content": made.asked(asked)},
                    {"role": "assistant", "content": said},
                ],
            }
            lines.append(made.line(line))
    (run / "rollouts" / f"step_{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = Batch(step=step, samples=tuple(samples), orchestrator_state={})
    kept = TrainedBatch(
        samples=np.arange(len(samples), dtype=np.int32),
        logprobs=np.concatenate(trained).astype(np.float32),
        record={"values": {"entropy_fresh": float(np.mean(entropies))}, "dtype": made.dtype},
    )
    _keep(run / "trained" / f"step_{step}", batch, kept)
    figures = {"reward/mean": float(np.mean(rewards)), "reward/std": float(np.std(rewards))}
    figures |= {"batch/with_spread": spread / made.groups, "batch/groups": made.groups, "batch/alike": 0.0}
    figures |= {"batch/rollouts": len(rewards), "batch/solve_all": 0.0, "batch/solve_none": 0.0}
    entropy = float(-(np.exp(log_softmax(tables[step])) * log_softmax(tables[step])).sum(-1).mean())
    return {"orchestrator": figures, "trainer": {"trained_tokens": 4.0 * len(rewards), "entropy": entropy}}


def _keep(folder: Path, batch: Batch, kept: TrainedBatch) -> None:
    """Write trained samples as `archive_trained_batch` does, without syncing to disk."""
    write_batch(folder.parent, batch, identity=RunIdentity(run_id="made", attempt=1), durable=False)
    (folder / "trained.safetensors").write_bytes(save({"samples": kept.samples, "logprobs": kept.logprobs}))
    (folder / "record.json").write_text(json.dumps(kept.record))
