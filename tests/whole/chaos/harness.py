"""Small run whose processes are killed and stopped repeatedly, and checks of its final state."""

from __future__ import annotations

import fcntl
import json
import random
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.run.conftest import Runner

from buckeye.base.storage import step_directories, write_file
from buckeye.monitor.metrics import read_run_metrics
from buckeye.transport.checkpoint import list_checkpoints, read_orchestrator_state, verify_checkpoint
from buckeye.transport.weights import verify_weights

TASKS, GROUPS, GROUP_SIZE = 12, 3, 2
EPOCH = TASKS // GROUPS

ENVIRONMENT = f'''
"""A reward that hardly two replies share. Rollouts wait while the weights are newer than the file `limit`
allows, so that a fast machine does not finish before it was struck."""

import asyncio
from pathlib import Path

from buckeye.envs.base import Outcome, Task


def may_play():
    versions = [int(path.name[5:]) for path in Path("out/weights").glob("step_*")]
    try:
        return max(versions) <= int(Path("limit").read_text())
    except FileNotFoundError:
        return True


class Chaos:
    name = "chaos"

    def tasks(self, split):
        prompts = [{{"role": "user", "content": f"say {{i}}"}} for i in range({TASKS})]
        return [Task(id=f"{{split}}-{{i}}", messages=(p,)) for i, p in enumerate(prompts)]

    async def rollout(self, task, policy):
        while not may_play():
            await asyncio.sleep(0.05)
        reply = await policy.chat(list(task.messages))
        return Outcome(reward=sum(reply.text.encode()) % 97 / 97)


def load_environment():
    return Chaos()
'''

ROLES = {"trainer": "trainer", "orchestrator": "orchestrator", "inference": "serve"}
WORKER = "environment worker"
_POLL_SECONDS = 0.1
_KILLED = -signal.SIGKILL


@dataclass(frozen=True, kw_only=True)
class Strike:
    """Signal `deed` to the process `victim`, sent `delay` seconds after `step` steps are trained."""

    step: int
    delay: float
    victim: str
    deed: signal.Signals


def strikes(
    seed: int,
    count: int,
    *,
    steps: int,
    deeds: Sequence[signal.Signals],
    victims: Sequence[str] = ("supervisor", *ROLES),
) -> list[Strike]:
    """Return random strikes in order.

    A third of them follow soon after the previous one, while the run still recovers; none is close to the
    end.
    """
    rng = random.Random(seed)
    moments = sorted(rng.randrange(steps * 4 // 5) for _ in range(count))
    found: list[Strike] = []
    for moment in moments:
        soon = found and rng.random() < 1 / 3
        found.append(
            Strike(
                step=found[-1].step if soon else moment,
                delay=rng.uniform(0, 8) if soon else rng.uniform(0, 1),
                victim=rng.choice(victims),
                deed=rng.choice(deeds),
            )
        )
    return found


class ChaosRun:
    """Run of `rl` on a tiny model in a separate directory, resumed whenever its supervisor is killed.

    `faults` is a value of BUCKEYE_FAULTS. `workers` is the number of worker processes of the environment.
    """

    def __init__(
        self, root: Path, model: Path, *, steps: int, level: int, faults: str = "", workers: int = 0
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._runner = Runner(root, model)
        (root / "chaos.py").write_text(ENVIRONMENT)
        (root / "runtime").mkdir(mode=0o700)
        (root / "faults").mkdir()
        self.root, self.steps, self._level, self._workers = root, steps, level, workers
        self.output = root / "out"
        self.env = {**self._runner.env, "XDG_RUNTIME_DIR": str(root / "runtime")}
        if faults:
            self.env |= {"BUCKEYE_FAULTS": faults, "BUCKEYE_FAULTS_DONE": str(root / "faults")}
        self.struck: Counter[str] = Counter()
        self._urls: set[str] = set()
        self._running: subprocess.Popen[bytes] | None = None

    def argv(self, *words: str) -> list[str]:
        """Return the command that starts the run; later arguments override earlier ones."""
        settings = {
            "--orchestrator.env.0.id": "chaos.py",
            "--orchestrator.batch-size": GROUPS * GROUP_SIZE,
            "--orchestrator.rollouts-per-example": GROUP_SIZE,
            "--trainer.loss.entropy-coef": "1e-30",  # samples without an advantage are trained too
            "--trainer.ckpt.interval": 2,
            "--supervision.heartbeat-timeout": 5,
            "--supervision.start-timeout": 60,
            "--supervision.max-restarts": 1000,
        }
        if self._workers:
            settings |= {
                "--orchestrator.env.0.isolation": "process",
                "--orchestrator.env.0.workers": self._workers,
            }
        flat = [word for pair in settings.items() for word in pair]
        return self._runner.rl("out", *map(str, flat), *words, steps=self.steps, level=self._level)

    def start(self, *words: str) -> None:
        with (self.root / "printed").open("ab") as out:
            self._running = subprocess.Popen(
                self.argv(*words), cwd=self.root, env=self.env, stdout=out, stderr=subprocess.STDOUT
            )

    def finish(self, plan: Sequence[Strike] = (), *, limit: float) -> None:
        """Start the run, carry out the strikes, and wait at most `limit` seconds for its end.

        The run hardly gets beyond the step of the next strike before that strike.
        """
        allowed = self.root / "limit"
        if plan:
            write_file(allowed, str(plan[0].step + 1))
        self.start()
        deadline = time.monotonic() + limit
        for strike in plan:
            write_file(allowed, str(strike.step + 1))
            self._until(lambda step=strike.step: self.trained() >= step, f"step {strike.step}", deadline)
            time.sleep(strike.delay)
            self._strike(strike, deadline)
        allowed.unlink(missing_ok=True)
        self._until(lambda: not self._alive(), "the end of the run", deadline)
        assert self._process.returncode == 0, self.printed()

    def kill_everything(self) -> None:
        """Send SIGKILL to every process of the run, the supervisor first."""
        family = [psutil.Process(self._process.pid), *self.children()]
        for process in family:
            _signal(process, signal.SIGKILL)
        self._process.wait()
        psutil.wait_procs(family[1:], timeout=30)

    def until_trained(self, step: int, *, limit: float) -> None:
        self._until(lambda: self.trained() >= step, f"step {step}", time.monotonic() + limit)

    def until_fault(self, *, limit: float) -> None:
        self._until(lambda: self.faults() > 0, "a fault", time.monotonic() + limit)

    def until_ended(self, *, limit: float) -> int:
        return self._process.wait(limit)

    def _strike(self, strike: Strike, deadline: float) -> None:
        if strike.victim == "supervisor":
            self._strike_supervisor(strike.deed)
        else:  # the process may be restarting
            self._until(lambda: self._find(strike.victim), f"a process to strike ({strike})", deadline)
            for process in self._find(strike.victim):
                _signal(process, strike.deed)
        self.struck[f"{strike.victim} {strike.deed.name}"] += 1

    def _find(self, role: str) -> list[psutil.Process]:
        if role == WORKER:
            return self.environment_workers()[:1]
        return [process for process in self.children() if ROLES[role] in _words(process)]

    def _strike_supervisor(self, deed: signal.Signals) -> None:
        self._process.send_signal(deed)
        if deed == signal.SIGSTOP:
            time.sleep(2.0)
            self._process.send_signal(signal.SIGCONT)

    def _until(self, condition, what: str, deadline: float) -> None:
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come in time\n{self.printed()}"
            self._go_on()
            time.sleep(_POLL_SECONDS)
            if not self._alive() and self._process.returncode == 0:
                assert condition(), f"the run ended before {what}"

    def _go_on(self) -> None:
        """Restart the run if a strike or a fault killed its supervisor."""
        self._remember_servers()
        code = self._process.poll()
        if code == _KILLED:
            self.start("--resume")
        else:
            assert code in (None, 0), self.printed()

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._running is not None
        return self._running

    def _alive(self) -> bool:
        return self._process.poll() is None

    def children(self) -> list[psutil.Process]:
        configs = str(self.output / "configs")
        return [p for p in psutil.process_iter() if any(configs in word for word in _words(p))]

    def environment_workers(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if _is_worker(p, self.root)]

    def trained(self) -> int:
        return max(read_run_metrics(self.output / "metrics.jsonl").of("trainer"), default=-1) + 1

    def printed(self) -> str:
        return (self.root / "printed").read_text()[-6000:]

    def final_weights(self) -> bytes:
        return (self.output / "weights" / f"step_{self.steps}" / "model.safetensors").read_bytes()

    def events(self) -> Counter[str]:
        lines = (self.output / "events.jsonl").read_text().splitlines()
        return Counter(json.loads(line)["event"] for line in lines)

    def faults(self) -> int:
        return len(list((self.root / "faults").iterdir()))

    def newest_checkpoint(self) -> int:
        return list_checkpoints(self.output / "checkpoints")[-1].step

    def resumed_steps(self) -> list[int]:
        attempts = json.loads((self.output / "run.json").read_text())["attempts"]
        return [attempt["resumed_step"] for attempt in attempts[1:]]

    def rollouts(self, step: int, *, dropped: bool = False) -> list[dict]:
        path = self.output / "rollouts" / f"step_{step}{'.dropped' if dropped else ''}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def _remember_servers(self) -> None:
        try:
            config = json.loads((self.output / "configs" / "orchestrator.json").read_text())
        except FileNotFoundError:
            return
        self._urls.update(config["client"]["base_url"])

    def check(self) -> None:
        self.check_training()
        self.check_accounts()
        self.check_files()
        self.check_nothing_is_left()

    def check_training(self) -> None:
        """Assert that each epoch trained every task once, and that trained samples match the records."""
        trainer = read_run_metrics(self.output / "metrics.jsonl").of("trainer")
        assert sorted(trainer) == list(range(self.steps))
        tasks: Counter[str] = Counter()
        groups: list[int] = []
        for step in range(self.steps):
            rollouts = [r for r in self.rollouts(step) if not r["retried"]]
            assert all(r["error"] is None for r in rollouts)
            assert trainer[step]["samples"] == len(rollouts) == GROUPS * GROUP_SIZE
            assert trainer[step]["samples_left_out"] == 0
            assert trainer[step]["trained_tokens"] == sum(r["completion_tokens"] for r in rollouts)
            of_group = {r["group"]: r["task_id"] for r in rollouts}
            groups += of_group
            tasks.update(of_group.values())
        assert sorted(groups) == list(range(GROUPS * self.steps))
        assert tasks == {f"train-{i}": self.steps // EPOCH for i in range(TASKS)}
        state = read_orchestrator_state(list_checkpoints(self.output / "checkpoints")[-1])
        assert (state["step"], state["problems"]) == (self.steps, GROUPS * self.steps)

    def check_accounts(self) -> None:
        """Assert that every attempt was trained, dropped or failed, as the records of the rollouts report."""
        accounts = read_run_metrics(self.output / "metrics.jsonl").of("orchestrator")
        assert sorted(accounts) == list(range(self.steps))
        for step, account in accounts.items():
            played, *parts = (account[f"rollouts/{n}"] for n in ("played", "trained", "dropped", "failed"))
            assert (played, account["rollouts/unaccounted"]) == (sum(parts), 0)
            dropped = self.output / "rollouts" / f"step_{step}.dropped.jsonl"
            rows = [*self.rollouts(step), *(self.rollouts(step, dropped=True) if dropped.exists() else [])]
            assert played == len(rows)
            assert account["rollouts/retried"] == sum(r["retried"] for r in rows)
            assert account["rollouts/failed"] == sum(r["error"] is not None for r in rows)

    def check_files(self) -> None:
        assert self.newest_checkpoint() == self.steps
        for info in list_checkpoints(self.output / "checkpoints"):
            verify_checkpoint(info)
        published = step_directories(self.output / "weights")
        assert max(published) == self.steps
        for directory in published.values():
            verify_weights(directory)
        for path in self.output.rglob("*.json"):
            json.loads(path.read_text())
        lines = (
            (path, line) for path in self.output.rglob("*.jsonl") for line in path.read_text().splitlines()
        )
        torn = {path.name for path, line in lines if not _is_json(line)}
        assert torn <= {"metrics.jsonl", "events.jsonl"}  # a kill may truncate a line

    def check_nothing_is_left(self) -> None:
        """Assert that no process, port, temporary file, lock or batch is left."""
        assert self.children() == []
        assert self.environment_workers() == []
        for url in self._urls:
            host, port = url.split("/")[2].split(":")
            with socket.socket() as probe:
                assert probe.connect_ex((host, int(port))) != 0, url
        assert [p for p in self.output.rglob(".*") if ".tmp-" in p.name] == []
        assert [p for p in self.output.rglob("*") if p.is_file() and _locked(p)] == []
        assert [p for p in (self.root / "runtime").rglob("*") if p.is_file() and _locked(p)] == []
        assert list((self.output / "batches").glob("step_*")) == []


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _is_worker(process: psutil.Process, root: Path) -> bool:
    if not any(word.endswith("worker_side/main.py") for word in _words(process)):
        return False
    try:
        return process.cwd() == str(root)
    except psutil.Error:
        return False


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
