"""Tiny model and environment, and `rl` runs on them."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from buckeye.base.json_lines import read_json_lines
from buckeye.launch.plan import Role
from buckeye.launch.processes import Processes
from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from tests.command import check_json, run_here
from tests.made_once import made_once
from tests.waiting import HANG

ENVIRONMENT = '''
"""Reward for the share of a's in the first three characters: a tiny model learns it at once."""

from buckeye.envs.base import Outcome, Task


class Letters:
    name = "letters"

    def tasks(self, split):
        prompts = [{"role": "user", "content": f"say {i}"} for i in range(40)]
        return [Task(id=f"{split}-{i}", messages=(p,)) for i, p in enumerate(prompts)]

    async def rollout(self, task, policy):
        reply = await policy.chat(list(task.messages))
        return Outcome(reward=reply.text[:3].count("a") / 3)


def load_environment():
    return Letters()
'''


def _adds_up(record):
    """Return True if each rollout of a step is in exactly one account; holds for every run in the tests."""
    parts = (record[f"rollouts/{name}"] for name in ("trained", "dropped", "failed"))
    return record["rollouts/played"] == sum(parts) and record["rollouts/unaccounted"] == 0


class Runner:
    """Runner of this environment's Python commands in a separate directory."""

    def __init__(self, root, model):
        self.root = root
        self.model = model
        self.printed = ""
        (root / "letters.py").write_text(ENVIRONMENT)
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PRIME_", "BUCKEYE_"))},
            "HF_HUB_OFFLINE": "1",
        }

    def argv(self, *words):
        return [sys.executable, "-m", "buckeye", *map(str, words)]

    def rl(self, output, *words, steps=4, level=1):
        return self.argv(
            *("rl", "--model.name", self.model, "--max-steps", steps, "--max-async-level", level),
            *("--orchestrator.env.0.id", "letters.py", "--orchestrator.batch-size", 16),
            *("--orchestrator.rollouts-per-example", 4, "--orchestrator.seq-len", 64),
            *("--orchestrator.sampling.max-tokens", 6, "--trainer.optim.lr", "1e-2"),
            *("--inference", "{}", "--output-dir", output),
            *words,
        )

    def run(self, argv, *, limit=HANG):
        done = subprocess.run(
            argv, cwd=self.root, env=self.env, capture_output=True, text=True, timeout=limit, check=False
        )
        check_json(argv[3:], done.stdout)
        return done

    def ok(self, argv, *, limit=HANG):
        """Run a command as `run` does, and assert that it succeeds."""
        done = self.run(argv, limit=limit)
        assert done.returncode == 0, done.stderr + done.stdout
        return done

    def here(self, argv):
        """Run a command in this process; only for commands that exit before they start a process."""
        return run_here(*argv[3:], cwd=self.root, env=self.env)

    def start(self, argv):
        return subprocess.Popen(
            argv, cwd=self.root, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def metrics(self, output, process):
        records = read_json_lines(self.root / output / "metrics.jsonl")  # the last record may be incomplete
        found = {r["step"]: r for r in records if r["process"] == process}
        if process == "orchestrator":
            assert all(_adds_up(record) for record in found.values())
        return found

    def curve(self, output):
        """Return reward, loss and gradient norm of every step, without rounding."""
        rewards, losses = (self.metrics(output, process) for process in ("orchestrator", "trainer"))
        return [
            (step, rewards[step]["reward/mean"], losses[step]["loss"], losses[step]["grad_norm"])
            for step in sorted(losses)
        ]

    def rollouts(self, output, step):
        return list(read_json_lines(self.root / output / "rollouts" / f"step_{step}.jsonl"))


def processes_of(directory):
    """Return the processes whose command line names a directory."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(directory) in word for word in process.info["cmdline"] or [])
    ]


def role(code, *, kind="trainer", index=0, **more):
    """Return a process of a run that executes this code."""
    argv = (sys.executable, "-c", code)
    return Role(kind=kind, index=index, argv=argv, **more)


@pytest.fixture
def processes(tmp_path):
    """Processes of a run, killed when the test ends."""
    started = Processes(tmp_path, {})
    yield started
    for child in list(started.children):
        child.process.signal(signal.SIGCONT, session=False)
        started.kill(child, "the test is over")
        child.process.wait()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    texts = ["say 1 2 3 4 5 6 7 8 9 a b c d"] * 20
    size = TinySize(vocab_size=310, layers=1, hidden=64, max_length=128)
    return (
        made_once(
            tmp_path_factory,
            "letters-model",
            lambda folder: make_tiny_model(folder / "tiny", texts=texts, size=size, seed=0),
        )
        / "tiny"
    )


@pytest.fixture(scope="session")
def finished(tmp_path_factory, tiny_model):
    """Runner with a finished run `out` of 5 synchronous steps, for tests that do not change it."""

    def make(folder):
        runner = Runner(folder, tiny_model)
        done = runner.ok(runner.rl("out", steps=5, level=0))
        (folder / "printed").write_text(done.stdout)

    runner = Runner(made_once(tmp_path_factory, "finished", make), tiny_model)
    runner.printed = (runner.root / "printed").read_text()
    return runner


@pytest.fixture
def runner(tmp_path, tiny_model):
    return Runner(tmp_path, tiny_model)


@pytest.fixture
def start(runner):
    """Return a function that starts commands, which are killed when the test ends."""
    started = []
    yield lambda argv: started.append(runner.start(argv)) or started[-1]
    for process in started:
        with process:
            process.kill()
