"""`rl` trains a tiny model for five steps on environments of others, each in an interpreter of its own.

What is trained on is what was sampled, token by token.
"""

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.run.conftest import Runner
from tests.workers.adapters.venvs import python_of
from transformers import AutoTokenizer

from buckeye.trainer.model.tiny import TinySize, make_tiny_model

PACKAGES = Path(__file__).resolve().parent / "packages"
STEPS, BATCH, GROUP = 5, 8, 4

pytestmark = pytest.mark.slow

ENVIRONMENTS = {
    "v0-single-turn": ("verifiers-031", f"{PACKAGES}/sums_v0.py", {"for_letters": True}),
    "v0-tool": ("verifiers-031", f"{PACKAGES}/tool_v0.py", {}),
    "v0-multi-turn": ("verifiers-031", f"{PACKAGES}/guess_v0.py", {}),
    "v1-in-process": ("verifiers-040", f"{PACKAGES}/sums_v1.py", {"for_letters": True}),
    "v1-subprocess": (
        "verifiers-040",
        f"{PACKAGES}/sums_v1.py",
        {"for_letters": True, "harness": "program_harness"},
    ),
    "reasoning-gym": ("reasoning-gym", "reasoning-gym/chain_sum", {"size": 20, "system_prompt": "simple"}),
    "textarena": ("textarena", "textarena/GuessTheNumber-v0", {"num_tasks": 20, "num_eval": 4}),
    "agents-sdk": ("openai-agents", "agent", {"callable": f"{PACKAGES}/agents_sdk.py:play"}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    size = TinySize(vocab_size=310, layers=1, hidden=64, max_length=2048)
    make_tiny_model(path, texts=["say 1 2 3 4 5 6 7 8 9 a b c d"] * 20, size=size, seed=0)
    return path


class Keeper:
    """Keeps the batches of a run, which the trainer removes behind itself."""

    def __init__(self, output):
        self._output = output
        self._over = threading.Event()
        self.batches = {}

    def __enter__(self):
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _watch(self):
        kept = self._output.parent / "kept"
        kept.mkdir()
        while not self._over.is_set():
            for path in self._output.glob("batches/step_*/batch.safetensors"):
                step = int(path.parent.name.removeprefix("step_"))
                if step not in self.batches:
                    copy = kept / f"{step}.safetensors"
                    os.link(path, copy)
                    self.batches[step] = load_file(copy)
            time.sleep(0.01)


def write_tasks(path):
    rows = [{"id": str(n), "prompt": f"{n} times 7?", "answer": n * 7} for n in range(2, 22)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def env_table(env_id, args, python, **more):
    """An `[[env]]` of an orchestrator file; JSON values of these kinds are TOML's."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in more.items()]
    return "\n".join(
        [
            "[[env]]",
            f"id = {json.dumps(env_id)}",
            f"python = {json.dumps(str(python))}",
            'isolation = "process"',
            *lines,
            "[env.args]",
            *(f"{name} = {json.dumps(value)}" for name, value in args.items()),
            "",
        ]
    )


def train(tmp_path, model, *tables):
    """Run `rl`: its rollouts by step, its batches by step, and the tokenizer."""
    settings = {"batch_size": BATCH, "rollouts_per_example": GROUP, "seq_len": 1536, "max_steps": STEPS}
    lines = [f"{name} = {value}" for name, value in settings.items()]
    orchestrator = "\n".join([*lines, "[sampling]", "max_tokens = 8", "", *tables])
    (tmp_path / "orch.toml").write_text(orchestrator)
    runner, output = Runner(tmp_path, model), tmp_path / "out"
    runner.env["HOME"] = str(tmp_path)
    words = ("--model.name", model, "--max-async-level", 0, "--orchestrator", "@", "orch.toml")
    words += ("--trainer.optim.lr", "1e-2")
    with Keeper(output) as keeper:
        done = runner.run(
            runner.argv("rl", *words, "--inference", "{}", "--max-steps", STEPS, "--output-dir", output),
            limit=900,
        )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rollouts = {
        step: [
            json.loads(line)
            for line in (output / "rollouts" / f"step_{step}.jsonl").read_text().rstrip("\n").split("\n")
        ]
        for step in range(STEPS)
    }
    assert sorted(keeper.batches) == list(range(STEPS))
    return rollouts, keeper.batches, AutoTokenizer.from_pretrained(model)


def samples_of(batch):
    """(token ids, loss mask, log-probs, versions) of every sample."""
    ends = np.cumsum(batch["lengths"])
    names = ("token_ids", "loss_mask", "logprobs", "versions")
    return list(zip(*(np.split(batch[name], ends[:-1]) for name in names), strict=True))


def assert_tokens_are_as_sampled(rollouts, batch, tokenizer):
    """Every sampled token is trained on once, under the version and log-prob it was sampled with; all other
    tokens are context. The conversations only grow, or begin anew."""
    played = [rollout for rollout in rollouts if rollout["error"] is None]
    samples = samples_of(batch)
    for token_ids, mask, logprobs, versions in samples:
        assert len(token_ids) == len(mask) == len(logprobs) == len(versions)
        assert not mask[0]
        assert (logprobs[~mask] == 0).all()
        assert (versions[~mask] == -1).all()
        assert (versions[mask] >= 0).all()
        assert (logprobs[mask] <= 0).all()
    assert sum(int(mask.sum()) for _, mask, _, _ in samples) == sum(r["completion_tokens"] for r in played)
    texts = Counter(tokenizer.decode(ids) for ids, _, _, _ in samples)
    assert texts == Counter(text for rollout in played for text in rollout["text"])
    for rollout in played:
        assert rollout["turns"] == 1 + rollout["turns_extended"] + rollout["turns_branched"]
        assert len(rollout["text"]) == 1 + rollout["turns_branched"]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_five_steps(name, tmp_path, model):
    venv, env_id, args = ENVIRONMENTS[name]
    if env_id == "agent":
        write_tasks(tmp_path / "tasks.jsonl")
        args = {**args, "tasks": str(tmp_path / "tasks.jsonl")}
    steps, batches, tokenizer = train(tmp_path, model, env_table(env_id, args, python_of(venv)))
    for step, rollouts in steps.items():
        assert len(rollouts) == BATCH
        assert [rollout["error"] for rollout in rollouts] == [None] * BATCH
        assert_tokens_are_as_sampled(rollouts, batches[step], tokenizer)
        if "for_letters" in args:
            for rollout in rollouts:
                assert rollout["reward"] == pytest.approx(letters_of(rollout, tokenizer), abs=1e-6)
    if "for_letters" in args:
        assert len({rollout["reward"] for rollouts in steps.values() for rollout in rollouts}) > 1
    turns = [rollout["turns"] for rollouts in steps.values() for rollout in rollouts]
    if name in ("v0-multi-turn", "textarena"):
        assert max(turns) > 1
        assert any(rollout["turns_extended"] for rollouts in steps.values() for rollout in rollouts)


def letters_of(rollout, tokenizer):
    """The reward as the reply says it should be, read from the text of the sample."""
    (text,) = rollout["text"]
    reply = text.rpartition("assistant\n")[2].removesuffix(tokenizer.eos_token)
    return sum(character.islower() for character in reply.strip()[:3]) / 3


def test_contradictory_needs_train_together(tmp_path, model):
    """One program has `openai` 1, the other `openai` 3."""
    write_tasks(tmp_path / "tasks.jsonl")
    args = {"command": ["python", f"{PACKAGES}/openai_chat.py"], "tasks": str(tmp_path / "tasks.jsonl")}
    steps, batches, tokenizer = train(
        tmp_path,
        model,
        env_table("agent", args, python_of("openai-1"), name="old"),
        env_table("agent", args, python_of("openai-agents"), name="new"),
    )
    majors = {"old": set(), "new": set()}
    for step, rollouts in steps.items():
        assert [rollout["error"] for rollout in rollouts] == [None] * len(rollouts)
        assert_tokens_are_as_sampled(rollouts, batches[step], tokenizer)
        for rollout in rollouts:
            majors[rollout["env"]].add(rollout["components"]["openai"])
    assert majors == {"old": {1.0}, "new": {3.0}}
