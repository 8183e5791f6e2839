"""`rl` trains a tiny model for five steps on third-party environments in separate interpreters.

The trained tokens equal the sampled ones. benchmarks/ecosystems.py trains on many more environments.
"""

import json
from pathlib import Path

import pytest
from benchmarks.ecosystems import check_batch
from tests.run.conftest import Runner
from tests.workers.adapters.venvs import python_of
from transformers import AutoTokenizer

from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from buckeye.transport.batches import read_trained_batch

PACKAGES = Path(__file__).resolve().parent / "packages"
STEPS, BATCH, GROUP = 5, 8, 4

pytestmark = pytest.mark.slow

DIGITS = [{"prompt": "say", "reward_spec": {"ground_truth": "1"}, "extra_info": {"max_turns": 3}}] * 4
GAMES = {"folder": str(PACKAGES), "num_tasks": 20, "num_eval": 4, "seed": 20}
SHORT = {"num_tasks": 20, "num_eval": 4, "max_steps": 5, "system_prompt": "say"}
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
    "textarena": ("textarena", "textarena/GuessTheNumber-v0", {"num_tasks": 20, "num_eval": 4}),
    "frozen-lake": ("gymnasium", "gymnasium/FrozenLake-v1", {**SHORT, "actions": list("1234")}),
    "gsm8k-multi-turn": ("skyrl-gym", "skyrl-gym/gsm8k_multi_turn", {"tasks": DIGITS}),
    "inspect-letters": ("inspect-ai", f"inspect-ai/{PACKAGES}/inspect_tasks.py@spoken", {}),
    "inspect-tools": ("inspect-ai", f"inspect-ai/{PACKAGES}/inspect_tasks.py@products", {}),
    "inspect-evals": ("inspect-ai", "inspect-ai/inspect_evals/agent_threat_bench_memory_poison", {}),
    "openenv-count": ("openenv", "openenv/openenv_games:count", GAMES),
    "agents-sdk": ("openai-agents", "agent", {"callable": f"{PACKAGES}/agents_sdk.py:play"}),
}
MULTI_TURN = (
    "v0-multi-turn",
    "textarena",
    "frozen-lake",
    "gsm8k-multi-turn",
    "openenv-count",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    size = TinySize(vocab_size=310, layers=1, hidden=64, max_length=2048)
    make_tiny_model(path, texts=["say 1 2 3 4 5 6 7 8 9 a b c d"] * 20, size=size, seed=0)
    return path


def write_tasks(path, rows=()):
    rows = rows or [{"id": str(n), "prompt": f"{n} times 7?", "answer": n * 7} for n in range(2, 22)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def env_table(env_id, args, python, **more):
    """Return an `[[env]]` of an orchestrator file; JSON values of these kinds are valid TOML."""
    values = {"id": env_id, "python": str(python), "isolation": "process", **more}
    tables = (("[[env]]", values), ("[env.args]", args))
    lines = [
        [head, *(f"{name} = {json.dumps(value)}" for name, value in rows.items())] for head, rows in tables
    ]
    return "\n".join(line for table in lines for line in table) + "\n"


def train(tmp_path, model, *tables):
    """Run `rl`, check that each batch has the sampled tokens, and return the rollouts of each step."""
    settings = {"batch_size": BATCH, "rollouts_per_example": GROUP, "seq_len": 1536, "max_steps": STEPS}
    lines = [f"{name} = {value}" for name, value in settings.items()]
    orchestrator = "\n".join([*lines, "[sampling]", "max_tokens = 8", "", *tables])
    (tmp_path / "orch.toml").write_text(orchestrator)
    runner, output = Runner(tmp_path, model), tmp_path / "out"
    runner.env["HOME"] = str(tmp_path)
    words = ("--model.name", model, "--max-async-level", 0, "--orchestrator", "@", "orch.toml")
    words += ("--trainer.optim.lr", "1e-2", "--inference", "{}", "--max-steps", STEPS)
    done = runner.run(runner.argv("rl", *words, "--output-dir", output), limit=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps = []
    for step in range(STEPS):
        text = (output / "rollouts" / f"step_{step}.jsonl").read_text()
        steps.append([json.loads(line) for line in text.rstrip("\n").split("\n")])
        assert [rollout["error"] for rollout in steps[-1]] == [None] * len(steps[-1])
        batch, _ = read_trained_batch(output / "trained", step)
        check_batch(steps[-1], batch.samples, tokenizer, step)
    return steps, tokenizer


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_five_steps(name, tmp_path, model):
    venv, env_id, args = ENVIRONMENTS[name]
    if env_id == "agent" or "tasks" in args:
        write_tasks(tmp_path / "tasks.jsonl", args.get("tasks", ()))
        args = {**args, "tasks": str(tmp_path / "tasks.jsonl")}
    steps, tokenizer = train(tmp_path, model, env_table(env_id, args, python_of(venv)))
    assert [len(rollouts) for rollouts in steps] == [BATCH] * STEPS
    rollouts = [rollout for step in steps for rollout in step]
    if "for_letters" in args:
        for rollout in rollouts:
            assert rollout["reward"] == pytest.approx(letters_of(rollout, tokenizer), abs=1e-6)
        assert len({rollout["reward"] for rollout in rollouts}) > 1
    if name in MULTI_TURN:
        assert max(rollout["turns"] for rollout in rollouts) > 1
        assert any(rollout["turns_extended"] for rollout in rollouts)


def letters_of(rollout, tokenizer):
    """Return the reward that the text of the sample should have."""
    (text,) = rollout["text"]
    reply = text.rpartition("assistant\n")[2].removesuffix(tokenizer.eos_token)
    return sum(character.islower() for character in reply.strip()[:3]) / 3


def test_contradictory_needs_train_together(tmp_path, model):
    write_tasks(tmp_path / "tasks.jsonl")
    args = {"command": ["python", f"{PACKAGES}/openai_chat.py"], "tasks": str(tmp_path / "tasks.jsonl")}
    venvs = {"old": "openai-1", "new": "openai-agents"}
    tables = (env_table("agent", args, python_of(venv), name=name) for name, venv in venvs.items())
    steps, _ = train(tmp_path, model, *tables)
    majors = {(rollout["env"], rollout["components"]["openai"]) for step in steps for rollout in step}
    assert majors == {("old", 1.0), ("new", 3.0)}
