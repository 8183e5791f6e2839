"""`buckeye rl --provider ...` from the command to the model: only who rents out the machine is not real."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from buckeye.checkpoint import list_checkpoints, verify_checkpoint
from buckeye.trainer.tiny import TinySize, make_tiny_model
from tests.remote.landlord import KEY, Landlord, serve
from tests.remote.sshd import make_key, needs_sshd, processes_of, sshd
from tests.run.conftest import ENVIRONMENT

pytestmark = [needs_sshd, pytest.mark.slow, pytest.mark.timeout(1800)]

SECRET = "hf_abcdefghijklmnop"


_STARTED: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def _nothing_goes_on():
    yield
    while _STARTED:
        running = _STARTED.pop()
        if running.poll() is None:
            running.kill()
            running.wait()


class Laptop:
    """Where the command is typed: a project with a tiny model, and a home of its own."""

    def __init__(self, folder, model, *, steps=3):
        self.folder = folder
        self.home = folder / "home"
        self.project = folder / "project"
        self.home.mkdir(parents=True)
        self.project.mkdir()
        (self.project / "letters.py").write_text(ENVIRONMENT)
        (self.project / ".env").write_text(f"HF_TOKEN={SECRET}\n")
        (self.project / "run.toml").write_text(
            f'output_dir = "outputs/run"\nmax_steps = {steps}\nmax_async_level = 0\n'
            f'[model]\nname = "{model}"\n'
            "[orchestrator]\nbatch_size = 8\nrollouts_per_example = 4\nseq_len = 64\n"
            '[orchestrator.sampling]\nmax_tokens = 6\n[[orchestrator.env]]\nid = "letters.py"\n'
            "[trainer.optim]\nlr = 1e-2\n[trainer.ckpt]\ninterval = 1\n[inference]\n"
        )
        self.output = self.project / "outputs" / "run"

    def environment(self, **more):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PRIME_", "BUCKEYE_", "HF_"))}
        return {**kept, "HOME": str(self.home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}

    def start(self, *words, **more):
        argv = [sys.executable, "-m", "buckeye", "rl", "@", "run.toml", *map(str, words)]
        out = (self.folder / "out").open("ab")
        running = subprocess.Popen(
            argv,
            cwd=self.project,
            env=self.environment(**more),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        _STARTED.append(running)
        return running

    def run(self, *words, **more):
        return self.start(*words, **more).wait(1200)

    def said(self):
        return (self.folder / "out").read_text()

    def command(self, *words, **more):
        done = subprocess.run(
            [sys.executable, "-m", "buckeye", "rl", *words],
            cwd=self.project,
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    size = TinySize(vocab_size=310, layers=1, hidden=64, max_length=128)
    make_tiny_model(path, texts=["say 1 2 3 4 5 6 7 8 9 a b c d"] * 20, size=size, seed=0)
    return path


def wait_for(condition, what, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what()} "
        time.sleep(0.3)


def cmdline(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def files_with(text, *folders):
    found = subprocess.run(["grep", "-rl", "--", text, *folders], capture_output=True, text=True, check=False)
    return found.stdout.splitlines()


def assert_trained(laptop, steps):
    last = list_checkpoints(laptop.output / "checkpoints")[-1]
    assert last.step == steps
    verify_checkpoint(last)
    assert (laptop.output / f"weights/step_{steps}/model.safetensors").is_file()
    records = [json.loads(line) for line in (laptop.output / "metrics.jsonl").read_text().splitlines()]
    trained = [record["step"] for record in records if record["process"] == "trainer"]
    assert sorted(set(trained)) == list(range(steps))


class Town:
    """A landlord whose pods are ssh servers on this machine, each with a home of its own."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True)
        self.key = make_key(folder / "key")
        self.pods = {}
        self.ended = []
        self.landlord = Landlord(
            active_after=0.0, ready_after=0.0, start_pod=self._start_pod, end_pod=self._end_pod
        )

    def _start_pod(self, pod):
        stack = contextlib.ExitStack()
        host = stack.enter_context(sshd(self.folder / pod["id"], key=self.key))
        self.pods[pod["id"]] = (host, stack)
        return f"root@127.0.0.1 -p {host.target.port}"

    def _end_pod(self, pod):
        if pod["id"] in self.pods:
            host, stack = self.pods.pop(pod["id"])
            stack.close()
            self.ended.append(host)

    @property
    def host(self):
        (host, _) = next(iter(self.pods.values()))
        return host

    @property
    def words(self):
        return ("--gpus", "2xA100", "--provider", "prime", "--yes", "--identity-file", str(self.key))


@pytest.fixture
def town(tmp_path):
    made = Town(tmp_path / "town")
    with serve(made.landlord) as url:
        made.environment = {"PRIME_API_BASE_URL": url, "PRIME_API_KEY": KEY}
        yield made
        for _, stack in made.pods.values():
            stack.close()


def assert_nothing_left(town, laptop):
    """No pod, no process of one, and no key in any file."""
    assert town.landlord.alive == []
    for host in town.ended:
        assert processes_of(host.folder) == []
    folders = [*(host.folder for host in town.ended), laptop.home, laptop.output]
    assert files_with(SECRET, *folders) == []
    assert files_with(KEY, *folders) == []


def test_a_host_of_mine(tmp_path, model):
    laptop = Laptop(tmp_path / "laptop", model)
    with sshd(tmp_path / "host") as host:
        code = laptop.run("--provider", "ssh", "--host", host.address, "--identity-file", host.key)
        assert code == 0, laptop.said()
        assert_trained(laptop, 3)
        assert "RL training finished!" in laptop.said()
        assert "Keys that go along: HF_TOKEN" in laptop.said()
        assert files_with(SECRET, host.home, laptop.home, laptop.output) == []
        seen = json.loads(laptop.command("status", "outputs/run", "--json"))
        assert (seen["state"], seen["step"], seen["checkpoint_step"]) == ("finished", 3, 3)
        assert "RL training finished!" in laptop.command("logs", "outputs/run")


def test_a_machine_that_is_rented(tmp_path, model, town):
    laptop = Laptop(tmp_path / "laptop", model)
    code = laptop.run(*town.words, **town.environment)
    assert code == 0, laptop.said()
    assert_trained(laptop, 3)
    assert_nothing_left(town, laptop)
    assert "The pod is gone." in laptop.said()
    assert KEY not in laptop.said()
    assert "on CPU slot(s) 0" in laptop.said()


def test_a_run_elsewhere_is_stopped_from_here(tmp_path, model):
    laptop = Laptop(tmp_path / "laptop", model, steps=2000)
    with sshd(tmp_path / "host") as host:
        running = laptop.start("--provider", "ssh", "--host", host.address, "--identity-file", host.key)
        wait_for(lambda: "Step 1/" in laptop.said(), laptop.said)
        attach = laptop.command("attach", "outputs/run").split()
        assert attach[:2] == ["ssh", "-t"]
        assert attach[-4:-1] == ["tmux", "-L", attach[-2]]
        laptop.command("stop", "outputs/run")
        assert running.wait(60) == 130
        last = list_checkpoints(laptop.output / "checkpoints")[-1]
        verify_checkpoint(last)
        seen = json.loads(laptop.command("status", "outputs/run", "--json"))
        assert (seen["state"], seen["checkpoint_step"]) == ("stopped", last.step)
        assert [pid for pid in processes_of(host.folder) if b"buckeye" in cmdline(pid)] == []


def test_a_pod_that_is_taken_away_and_another_one(tmp_path, model, town):
    laptop = Laptop(tmp_path / "laptop", model, steps=40)
    running = laptop.start(*town.words, **town.environment)
    wait_for(lambda: list_checkpoints(laptop.output / "checkpoints"), laptop.said)
    town.landlord.vanish(next(iter(town.landlord.pods)))
    assert running.wait(300) == 1
    said = laptop.said()
    assert "is gone" in said
    assert "Go on from it: buckeye rl @ run.toml --resume" in said
    kept = list_checkpoints(laptop.output / "checkpoints")[-1].step
    code = laptop.run("--resume", *town.words, **town.environment)
    assert code == 0, laptop.said()
    assert f"Going on from the checkpoint of step {kept}" in laptop.said()
    assert_trained(laptop, 40)
    assert_nothing_left(town, laptop)


def test_a_laptop_that_is_lost(tmp_path, model, town):
    laptop = Laptop(tmp_path / "laptop", model, steps=2000)
    own = {"BUCKEYE_DEAD_MAN_MINUTES": "0.2", "BUCKEYE_POD_KEY": KEY}
    running = laptop.start(*town.words, **town.environment, **own)
    wait_for(lambda: "Step 2/" in laptop.said(), laptop.said)
    assert len(town.landlord.alive) == 1
    folder = town.host.folder
    running.kill()
    running.wait(30)
    wait_for(lambda: not town.landlord.alive, lambda: "the pod is still there", seconds=240)
    wait_for(lambda: not processes_of(folder), lambda: processes_of(folder), seconds=60)
    (job,) = (folder / "home/.buckeye/jobs").iterdir()
    assert (job / "rc").read_text() == "130"
    assert "nobody has looked after this job" in (job / "dead_man").read_text()
    assert_nothing_left(town, laptop)


@pytest.mark.parametrize("stage", ["Connecting to", "4/5", "The run has started", "Step 1/"])
def test_ctrl_c_at_each_stage_leaves_nothing(tmp_path, model, town, stage):
    laptop = Laptop(tmp_path / "laptop", model, steps=2000)
    running = laptop.start(*town.words, **town.environment)
    wait_for(lambda: stage in laptop.said(), laptop.said)
    os.kill(running.pid, signal.SIGINT)
    assert running.wait(300) == 130, laptop.said()
    assert "The pod is gone." in laptop.said()
    assert "Traceback" not in laptop.said()
    assert_nothing_left(town, laptop)
    if stage == "Step 1/":
        assert list_checkpoints(laptop.output / "checkpoints")
