"""`buckeye rl` with the environments that its flags name, and the flags that it does not have."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from buckeye.cli import train
from buckeye.dataset.environment import load_environment as load_dataset
from buckeye.errors import UsageError
from buckeye.setup.recipe.environment import loaded_environment, parse_environment
from buckeye.workers.caller import EnvironmentServer
from buckeye.workers.environment import WorkerEnvironment

REWARD = "def reward(completion, answer):\n    return float(answer in completion)\n"
ENVIRONMENT = """
from buckeye.envs.base import Outcome, Task

class Count:
    name = "count"

    def __init__(self, size, word):
        self.size, self.word = size, word

    def tasks(self, split):
        if split != "train":
            raise KeyError(split)
        texts = [f"{self.word} {i}" for i in range(self.size)]
        return [Task(id=text, messages=[{"role": "user", "content": text}]) for text in texts]

    async def rollout(self, task, policy):
        return Outcome(reward=0.0)

def load_environment(size: int = 4, word: str = "Say"):
    return Count(size, word)
"""
DATA = ("--dataset", "prompts.jsonl", "--reward", "reward.py")


@pytest.fixture
def files(project):
    """The project with prompts, a reward function and an environment."""
    rows = [{"prompt": f"What is {i}+1?", "answer": str(i + 1), "topic": "sum"} for i in range(40)]
    for name, part in (("prompts.jsonl", rows), ("others.jsonl", rows[:4])):
        (project / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    (project / "reward.py").write_text(REWARD)
    (project / "my_env.py").write_text(ENVIRONMENT)
    return project


@pytest.fixture
def started(monkeypatch):
    """Configurations of the runs that were started."""
    configs = []
    monkeypatch.setattr(train, "start", lambda config, command, *_: configs.append(config) or 0)
    return configs


def test_longer_replies_make_rollouts_longer(files, planned):
    usual, longer = planned(*DATA), planned(*DATA, "--orchestrator.sampling.max-tokens", "1000")
    assert usual["orchestrator"]["sampling"]["max_tokens"] == 256
    assert longer["orchestrator"]["sampling"]["max_tokens"] == 1000
    assert longer["seq_len"] - usual["seq_len"] in range(1000 - 256 - 64, 1000 - 256 + 64)


def test_dataset_that_python_serves_has_the_sizes_of_the_command(files, planned, monkeypatch):
    usual = planned(*DATA)
    server = EnvironmentServer(load_dataset("prompts.jsonl", "reward.py"))
    try:
        for name, value in server.variables().items():
            monkeypatch.setenv(name, value)
        served = planned("--env", "caller")
    finally:
        server.close()
    for name in ("seq_len", "max_steps"):
        assert served[name] == usual[name]
    assert served["orchestrator"]["sampling"] == usual["orchestrator"]["sampling"]


def test_dataset_with_a_reward_is_an_environment(files, planned):
    written = planned(*DATA)
    assert written["orchestrator"]["env"] == [
        {"id": "dataset", "args": {"path": "prompts.jsonl", "reward": ["reward.py"]}}
    ]
    evaluation = written["orchestrator"]["eval"]
    assert evaluation.keys() == {"interval", "num_examples"}
    assert evaluation["interval"] == written["max_steps"]
    assert 0 < evaluation["num_examples"] < 20  # about a tenth of the prompts
    assert written["output_dir"] == "outputs/prompts"
    assert "inference" not in written
    assert "eval" not in planned(*DATA, "--no-eval")["orchestrator"]


def test_plan_warns_of_prompts_that_are_all_the_same(files, rl):
    rows = [{"prompt": "Add.", "question": f"{n} + 1"} for n in range(3)]
    (files / "same.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ("--dataset", "same.jsonl", "--reward", "json", "--dry-run", "--json")
    assert "same prompt" in json.loads(rl(*words)[1])["warning"]
    assert "warning" not in json.loads(rl(*words, "--prompt-column", "question")[1])


def test_options_of_a_dataset_are_arguments_of_its_environment(files, planned):
    words = ("--reward", "exact", "--reward-weights", "1,0.5", "--eval-dataset", "others.jsonl")
    words += ("--prompt-column", "prompt", "--answer-column", "answer")
    (environment,) = planned(*DATA, *words)["orchestrator"]["env"]
    assert environment["args"] == {
        "path": "prompts.jsonl",
        "reward": ["reward.py", "exact"],
        "reward_weights": [1.0, 0.5],
        "eval_path": "others.jsonl",
        "prompt_column": "prompt",
        "answer_column": "answer",
    }
    (environment,) = planned(*DATA, "--split", "train")["orchestrator"]["env"]
    assert environment["args"]["split"] == "train"


@pytest.mark.parametrize("reward", ["reward.py:reward", "regex:[0-9]{1,3}", "exact"])
def test_reward_is_one_text_with_its_commas(files, planned, reward):
    (environment,) = planned(*DATA[:2], "--reward", reward)["orchestrator"]["env"]
    assert environment["args"]["reward"] == [reward]


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("my_env.py", None),
        ("my_env.py:size=3", {"size": 3}),
        ("my_env.py:size=3,word=Write", {"size": 3, "word": "Write"}),
        ('my_env.py:word="3"', {"word": "3"}),
    ],
)
def test_env_is_an_id_or_a_path_with_arguments(files, rl, planned, text, args):
    (environment,) = planned("--env", text)["orchestrator"]["env"]
    assert (environment["id"], environment.get("args")) == ("my_env.py", args)
    tasks = json.loads(rl("--env", text, "--dry-run", "--json")[1])["tasks"]
    assert tasks.startswith(f"{(args or {}).get('size', 4)} to train on")


def test_environment_model_and_steps_start_a_run(files, rl, started):
    words = ("--env", "my_env.py", "--max-steps", "100", "--output-dir")
    for name in ("model", "model.name"):
        assert rl(f"--{name}", "tiny", *words, name)[0] == 0
    assert [config.output_dir.name for config in started] == ["model", "model.name"]
    for config in started:
        assert config.trainer.max_steps == 100
        assert config.trainer.model.name == config.inference.model.name == "tiny"
        assert config.orchestrator.env[0].id == "my_env.py"


def test_dataset_reward_and_nothing_else_start_a_run(files, rl, started):
    assert rl(*DATA)[0] == 0
    assert started[0].inference is not None
    assert (files / "outputs" / "prompts" / "run.toml").exists()
    assert rl("@", "outputs/prompts/run.toml", "--output-dir", "again")[0] == 0
    first, second = started
    assert first.orchestrator.env == second.orchestrator.env
    assert second.output_dir.name == "again"


def test_model_and_output_dir_are_flags_of_a_file_too(files, rl, started):
    (files / "run.toml").write_text('[orchestrator]\nenv = [{ id = "my_env.py" }]\n')
    three = ("--trainer", "@", "t.toml", "--orchestrator", "@", "run2.toml", "--inference", "@", "t.toml")
    (files / "t.toml").write_text("")
    (files / "run2.toml").write_text('env = [{ id = "my_env.py" }]\n')
    for form in (("@", "run.toml"), ("@run.toml",), three):
        assert rl(*form, "--model", "tiny", "--output-dir", "there")[0] == 0
    for config in started:
        assert (config.output_dir.name, config.trainer.model.name) == ("there", "tiny")
        assert config.inference.model.name == "tiny"


def test_prompts_without_a_reward_are_refused_with_the_rewards(files, rl, wording):
    code, out, err = rl("--dataset", "prompts.jsonl")
    assert (code, out, err) == (2, "", wording)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--environment my_env.py", "--env?"),
        ("--env.id my_env.py", "--env?"),
        ("--lr 1e-5", "--trainer.optim.lr?"),
        ("--learning-rate 1e-5", "--trainer.optim.lr?"),
        ("--steps 10", "--max-steps?"),
        ("--epochs 1", "--max-steps?"),
        ("--output out", "--output-dir?"),
        ("--rewards reward.py", "--reward?"),
        ("--reward-fn reward.py", "--reward?"),
        ("--reward-funcs=reward.py", "--reward?"),
        ("--data prompts.jsonl", "--dataset?"),
        ("--train-dataset prompts.jsonl", "--dataset?"),
        ("--max-tokens 10", "--orchestrator.sampling.max-tokens?"),
        ("--max-new-tokens 10", "--orchestrator.sampling.max-tokens?"),
        ("--temperature 1", "--orchestrator.sampling.temperature?"),
        ("--num-generations 8", "--orchestrator.rollouts-per-example?"),
        ("--batch-size 8", "--orchestrator.batch-size`"),
        ("--use-lora", "--trainer.model.experimental.lora?"),
        ("--gpu 1", "--gpus?"),
    ],
)
def test_name_of_another_program_is_one_error_with_the_name_here(files, rl, words, hint):
    for form in ((), ("@", "run.toml")):
        code, out, err = rl(*form, "--model", "tiny", *words.split())
        assert (code, out) == (2, "")
        assert err.count("error:") == 1
        assert hint in err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--reward reward.py", "BK-CLI-MISSING"),
        ("--env my_env.py --dataset prompts.jsonl", "BK-CLI-CONFLICT"),
        ("--env my_env.py --reward reward.py", "BK-CLI-CONFLICT"),
        ("--env my_env.py --config configs/my-env.yaml", "BK-CLI-CONFLICT"),
        ("--env my_env.py --split train", "BK-CLI-CONFLICT"),
        ("--config configs/my-env.yaml --dataset prompts.jsonl --reward exact", "BK-CLI-CONFLICT"),
        ("--dataset prompts.jsonl --answer-column answer", "BK-CLI-CONFLICT"),
        ("--env my_en.py", "BK-ENV-UNKNOWN"),
        ("--env my_env.py:", "BK-CLI-ARGUMENT"),
        ("--env my_env.py:size", "BK-CLI-ARGUMENT"),
        ("--env my_env.py:sizes=3", "BK-ENV-ARGUMENT"),
        ("--env my_env.py:size=0", "BK-ENV-TASKS"),
        ("--dataset prompts.jsonl --reward rewards.py", "BK-FILE-NOT-FOUND"),
        ("--dataset prompts.jsonl --reward exat", "BK-REWARD"),
        ("--dataset prompts.jsonl --reward reward.py --reward-weights 1,2", "BK-REWARD"),
        ("--dataset prompts.jsonl --reward reward.py --prompt-column q", "BK-DATA-FORMAT"),
        ("--dataset prompt.jsonl --reward reward.py", "BK-DATA-NOT-FOUND"),
        ("--env my_env.py --model tiny --model.name other", "BK-CLI-CONFLICT"),
        ("@ run.toml --env my_env.py", "BK-CLI-CONFLICT"),
        ("@ run.toml --dataset prompts.jsonl --reward exact", "BK-CLI-CONFLICT"),
        ("@ run.toml --json", "BK-CLI-CONFLICT"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_anything_is_written(files, rl, words, code, wording):
    (files / "run.toml").write_text('[orchestrator]\nenv = [{ id = "my_env.py" }]\n')
    ended, out, err = rl(*words.split())
    assert (ended, out) == (2, "")
    assert f"buckeye explain {code}\n" in err
    assert err == wording
    assert not (files / "outputs").exists()


def test_dry_run_of_a_file_prints_the_plan_and_with_json_the_settings(files, rl):
    (files / "run.toml").write_text('output_dir = "o"\n[orchestrator]\nenv = [{ id = "my_env.py" }]\n')
    code, out, _ = rl("@", "run.toml", "--model", "tiny", "--dry-run")
    assert (code, out.startswith("process"), "{" in out) == (0, True, False)
    code, out, _ = rl("@", "run.toml", "--model", "tiny", "--dry-run", "--json")
    assert (code, json.loads(out)["trainer"]["model"]["name"]) == (0, "tiny")


@pytest.mark.slow
def test_it_trains_on_prompts_with_one_command(files):
    def run(*words):
        command = [sys.executable, "-m", "buckeye", *words]
        done = subprocess.run(command, cwd=files, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    run("model", "tiny", "small", "--corpus", "prompts.jsonl", "--layers", "1", "--hidden", "64")
    words = ("--max-steps", "4", "--output-dir", "out", "--orchestrator.sampling.max-tokens", "8")
    printed = run("rl", "--model", "small", *DATA, *words)
    assert (files / "out" / "weights" / "step_4" / "model.safetensors").exists()
    assert (files / "out" / "evals" / "step_4").is_dir()
    samples = [line for line in printed.splitlines() if " SAMPLE " in line]
    assert "empty replies get 0.000" in samples[0]
    assert len(samples) == 4  # and three replies
    assert printed.index(samples[-1]) < printed.index("Step 1/4")
    assert "warning: model: " in printed
    assert printed.count("nearly random tokens") == 2  # before the start, and once in the run
    assert "orchestrator.sampling.max_tokens" not in printed

    run("rl", "resume", "out", "--max-steps", "5", "--trainer.optim.lr", "0.001")
    compared = run("rl", "compare", "out", "out")
    assert "settings of A changed at step 4: trainer.optim.lr: " in compared


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("owner/name@1.2", ("owner/name@1.2", {})),
        ("my_env.py:size=3,form=short", ("my_env.py", {"size": 3, "form": "short"})),
        ("my_env.py:sizes=[1, 2],last=true", ("my_env.py", {"sizes": [1, 2], "last": True})),
        ("textarena/Chess-v0:seat=0,opponent=self", ("textarena/Chess-v0", {"seat": 0, "opponent": "self"})),
        ("ors-sdk/cards:Cards", ("ors-sdk/cards:Cards", {})),
        ("openenv/app:App:url=http://host:80", ("openenv/app:App", {"url": "http://host:80"})),
    ],
)
def test_environments_are_named_with_their_arguments(text, parsed):
    assert parse_environment(text) == parsed


def test_workers_of_a_counted_environment_are_ended(monkeypatch):
    """The plan loads an environment once; the run starts its own workers."""
    ended = []
    worker_environment = object.__new__(WorkerEnvironment)
    worker_environment.splits = ("eval",)

    async def close():
        ended.append(True)

    worker_environment.close = close
    monkeypatch.setattr("buckeye.setup.recipe.environment.open_environment", lambda *_: worker_environment)
    with pytest.raises(UsageError):
        loaded_environment("owner/name")
    assert ended == [True]


@pytest.mark.parametrize("splits", [("eval",), ("train", "eval")])
def test_an_environment_without_tasks_to_train_on_is_refused(monkeypatch, splits):
    environment = SimpleNamespace(name="a", splits=splits, tasks=lambda split: [], rollout=None)
    monkeypatch.setattr("buckeye.setup.recipe.environment.open_environment", lambda *_: environment)
    with pytest.raises(UsageError) as refused:
        loaded_environment("owner/name")
    assert refused.value.code == "BK-ENV-TASKS"


@pytest.mark.parametrize("folder", ["/proc/none", "prompts.jsonl/none"])
def test_an_output_directory_that_cannot_be_made_is_one_error(files, rl, started, folder):
    code, _, printed = rl(*DATA, "--output-dir", folder)
    assert (code, started) == (1 if folder[0] == "/" else 2, [])
    assert "BK-UNEXPECTED" not in printed
    assert folder.split("/none")[0] in printed
