"""Runs without a network: `buckeye fetch`, `rl doctor --offline`, and the addresses that a run uses."""

from __future__ import annotations

import ipaddress
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.conftest import Runner
from tests.run.fake_hub import FakeHub
from tests.waiting import HANG, wait_for
from tests.workers.installed.package_index import serving, wheel

pytestmark = pytest.mark.e2e

LIBRARY = {
    "reasoning_gym/__init__.py": """
from dataclasses import dataclass


@dataclass
class Settings:
    seed: int = 0
    size: int = 10


class Letters:
    def __init__(self, seed, size):
        self.seed, self.size = seed, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"question": f"say {self.seed + index}", "answer": None}

    def score_answer(self, answer, entry):
        return 0.0 if answer is None else answer[:3].count("a") / 3


def create_dataset(name, **settings):
    return Letters(**settings)
""",
    "reasoning_gym/factory.py": (
        "from reasoning_gym import Letters, Settings\nDATASETS = {'letters': (Letters, Settings)}\n"
    ),
    "reasoning_gym/utils.py": "SYSTEM_PROMPTS = {}\n\n\ndef extract_answer(text):\n    return text\n",
}
BACKEND = """
import shutil


def build_wheel(folder, config_settings=None, metadata_directory=None):
    shutil.copy("{wheel}", folder)
    return "{wheel}"
"""
CONFIG = """
max_steps = 2

[model]
name = "org/tiny"

[orchestrator]
batch_size = 16
rollouts_per_example = 4
seq_len = 64
sampling = { max_tokens = 6 }

[[orchestrator.env]]
id = "dataset"
args = { path = "org/words", reward = "reward.py" }

[[orchestrator.env]]
id = "reasoning-gym/letters"
args = { size = 20, eval_size = 5, system_prompt = "" }

[inference]
"""
RECORDER = """
import os, sys


def write(line):
    file = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(file, line.encode() + bytes([10]))
    os.close(file)


def record(event, args):
    if event in ("socket.connect", "socket.sendto") and isinstance(args[1], tuple):
        write(f"connect {{args[1][0]}}")
    if event == "socket.getaddrinfo" and args[0]:
        write(f"connect {{args[0]}}")


write("start " + " ".join(" ".join(sys.orig_argv[1:]).split()))
sys.addaudithook(record)
"""
LOOPBACK_ONLY = """
import fcntl, os, socket, struct, sys

lo = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # up, running
fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, lo)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Offline(Runner):
    """Runner whose model and data are on a hub, and an environment in a package index, both on loopback."""

    def __init__(self, root, model, hub, index):
        super().__init__(root, model)
        self.hub, self.index = hub, index
        files = {path.name: path.read_bytes() for path in Path(model).iterdir() if path.is_file()}
        hub.files["org/tiny"] = {".gitattributes": b"*", "README.md": b"# tiny", "old.bin": b"x", **files}
        rows = "".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(40))
        hub.files["org/words"] = {"README.md": b"# words", "train.jsonl": rows.encode()}
        (root / "run.toml").write_text(CONFIG)
        (root / "reward.py").write_text("def reward(completion):\n    return completion.count('a') / 6\n")
        del self.env["HF_HUB_OFFLINE"]
        self.env |= {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_CACHE": str(root / "cache" / "hub"),
            "HF_HUB_DISABLE_XET": "1",
            "BUCKEYE_HOME": str(root / "home"),
            "UV_NO_CACHE": "1",
        }

    def fetch(self, *words):
        return self.run(self.argv("fetch", "@", "run.toml", "--index", self.index, *words))

    def doctor(self, *words):
        return self.run(self.argv("rl", "doctor", "--offline", "@", "run.toml", *words))

    def without_network(self):
        """Make hub and index unreachable, without variables that disable downloads."""
        self.env |= {"HF_ENDPOINT": "http://127.0.0.1:9", "UV_INDEX_URL": "http://127.0.0.1:9/simple"}


@pytest.fixture
def offline(tmp_path, tiny_model):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "reasoning-gym", "1.0", files=LIBRARY)
    with FakeHub() as hub, serving(wheels) as (index, _):
        yield Offline(tmp_path, tiny_model, hub, index)


def test_fetched_run_trains_without_a_network_and_connects_to_loopback_only(offline, tmp_path):
    before = offline.doctor("--json")
    failed = {check["name"]: check for check in json.loads(before.stdout) if check["state"] == "failed"}
    assert before.returncode == 1
    assert failed["model"]["do"] == failed["tasks of dataset"]["do"] == "buckeye fetch @ run.toml"
    assert (failed["model"]["code"], failed["tasks of dataset"]["code"]) == ("BK-OFFLINE", "BK-OFFLINE")
    assert "buckeye env install reasoning-gym" in failed["tasks of letters"]["do"]
    assert not offline.hub.tokens  # no request to the hub

    fetched = offline.fetch("--json")
    assert fetched.returncode == 0, fetched.stderr
    items = {item["name"]: item for item in json.loads(fetched.stdout)["items"]}
    assert set(items) == {"org/tiny", "org/words", "reasoning-gym 1.0"}
    assert all(item["downloaded"] and Path(item["path"]).is_dir() for item in items.values())
    model = offline.hub.files["org/tiny"]
    kept = {name for name in model if name.endswith((".json", ".safetensors", ".jinja", ".txt"))}
    assert items["org/tiny"]["size"] == sum(len(model[name]) for name in kept)
    again = json.loads(offline.fetch("--json").stdout)["items"]
    assert not any(item["downloaded"] for item in again)

    offline.without_network()
    log = tmp_path / "addresses"
    recorder = RECORDER.format(log=str(log))
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(recorder)
    (site,) = (tmp_path / "home" / "environments" / "reasoning-gym" / "venv" / "lib").glob("python3*")
    (site / "site-packages" / "sitecustomize.py").write_text(recorder)
    offline.env["PYTHONPATH"] = str(tmp_path / "hook")
    checked = offline.doctor()
    assert checked.returncode == 0, checked.stdout
    isolated = _namespace() + offline.argv("rl", "@", "run.toml", "--output-dir", "out")
    done = offline.run(isolated)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(offline.metrics("out", "trainer")) == {0, 1}
    lines = [line.partition(" ") for line in log.read_text().splitlines()]
    started = {text for kind, _, text in lines if kind == "start"}
    for part in ("rl doctor", "rl @ run.toml", "worker trainer", "worker orchestrator", "serve", "main.py"):
        assert any(part in text for text in started), part
    hosts = {text for kind, _, text in lines if kind == "connect"}
    assert hosts
    assert [host for host in hosts if not _is_loopback(host)] == []


def _namespace():
    """Return the start of a command that runs in a network namespace with loopback only; skip without one."""
    start = ["unshare", "-rn", sys.executable, "-c", LOOPBACK_ONLY]
    try:
        subprocess.run([*start, "/bin/true"], check=True, capture_output=True, timeout=HANG)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot make a network namespace ({error})")
    return start


def _is_loopback(host):
    return (
        host == "localhost" or (host[0].isdigit() and ipaddress.ip_address(host).is_loopback) or host == "::1"
    )


def test_interrupted_fetch_resumes_into_its_folder(offline):
    config = CONFIG.partition("[[orchestrator.env]]")[0] + '[[orchestrator.env]]\nid = "letters.py"\n'
    (offline.root / "model.toml").write_text(config)
    words = offline.argv("fetch", "@", "model.toml", "--to", "carry")
    offline.hub.files["org/tiny"]["notes.txt"] = b"x" * 25_000_000  # the client writes chunks of 10 MiB
    offline.hub.cut, offline.hub.cuts = 15_000_000, {"notes.txt"}
    hub = offline.root / "carry" / "hub"
    with offline.start(words) as first:
        wait_for(lambda: any(path.stat().st_size for path in hub.rglob("*.part")), "a part of the file")
        first.send_signal(signal.SIGINT)
        offline.hub.stalled.set()
        first.communicate(timeout=HANG)
    assert first.returncode != 0
    second = offline.run(words)
    assert second.returncode == 0, second.stderr
    assert f"bytes={10 * 2**20}-" in offline.hub.ranges
    script = offline.root / "carry" / "offline.sh"
    offline.without_network()
    check = f". {script} && exec {sys.executable} -m buckeye rl doctor --offline @ model.toml"
    assert offline.run(["sh", "-c", check]).returncode == 0
    assert offline.run(offline.argv("rl", "doctor", "--offline", "@", "model.toml")).returncode == 1


def test_incomplete_model_of_the_hub_is_reported(offline):
    del offline.hub.files["org/tiny"]["config.json"]
    done = offline.fetch()
    assert done.returncode == 1
    assert "BK-MODEL-NOT-FOUND" in done.stderr


def test_downloads_that_do_not_fit_are_refused_before_the_first(offline):
    offline.hub.sizes = {"model.safetensors": 10**15}
    done = offline.fetch()
    assert done.returncode != 0
    assert "BK-DISK-FULL" in done.stderr
    assert not list((offline.root / "cache").rglob("*.safetensors"))


def test_environment_from_git(offline, tmp_path):
    project = tmp_path / "gym"
    project.mkdir()
    made = wheel(project, "reasoning-gym", "2.0", files=LIBRARY)
    (project / "backend.py").write_text(BACKEND.format(wheel=made.name))
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C", str(project)]
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "gym")):
        subprocess.run([*git, *words], check=True)
    done = offline.fetch("--install", f"reasoning-gym @ git+file://{project}", "--json")
    assert done.returncode == 0, done.stderr
    names = {item["name"] for item in json.loads(done.stdout)["items"]}
    assert "reasoning-gym 2.0" in names


def test_dataset_of_the_hub_is_read_from_the_cache_if_the_hub_is_unreachable(offline):
    code = "from buckeye.dataset.rows import read_splits; print(len(read_splits('org/words')['train']))"
    python = [sys.executable, "-c", code]
    assert offline.run(python).stdout == "40\n"
    offline.without_network()
    done = offline.run(python)
    assert done.stdout == "40\n"
    offline.env["HF_HUB_OFFLINE"] = "1"
    (blob,) = (offline.root / "cache" / "hub" / "datasets--org--words").rglob("train.jsonl")
    blob.unlink()
    refused = offline.run(python)
    assert refused.returncode != 0
    assert "buckeye fetch" in refused.stderr
