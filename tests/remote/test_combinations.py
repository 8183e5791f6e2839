"""Every combination of dataset, tracker, environment and store that a plan accepts, for a rented machine.

The requirements of each are computed, and each distinct set is installed once, in a clean virtual
environment. Ten random combinations run to their end on rented machines. Only the provider, the hub, the
object store and the program that runs images are fake.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from buckeye.base.distribution import requirements
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.launch.preflight.software_checks import extras_of
from buckeye.mcp.tasks.dataset import write_dataset
from buckeye.mcp.tasks.task_files import read_tasks
from buckeye.mcp.tasks.trust import TRUSTED_VARIABLE, collect_task_resources
from buckeye.remote.bootstrap import EXTRAS, TOOLS, setup_steps
from buckeye.remote.software import pinned_requirements
from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from buckeye.transport.checkpoint import list_checkpoints
from buckeye.transport.object_store import CheckpointStore
from buckeye.workers.installed.install import InstallRequest, install_environment
from buckeye.workers.installed.record import ENVIRONMENTS_VARIABLE
from buckeye.workers.installed.venv import find_uv
from tests.mcp.gateway.test_runtimes import FAKE
from tests.places import ROOT
from tests.ports import free_port
from tests.remote.landlord import KEY, Landlord, serve
from tests.remote.sshd import needs_sshd, sshd
from tests.remote.test_s3 import BUCKET, server
from tests.run.conftest import ENVIRONMENT
from tests.run.fake_hub import FakeHub
from tests.workers.installed.package_index import wheel

__all__ = ["server"]

pytestmark = [needs_sshd, pytest.mark.e2e, pytest.mark.slow]

HUB = "someone/tasks"
SERVER = ROOT / "tests/mcp/environment/raw_server.py"
VERIFIERS = ("verifiers==0.3.1", "renderers==0.1.10", "openai<3", "mcp<2", "datasets")
WORDS = ("--provider", "prime", "--gpus", "2xA100", "--yes")
RUNS = 10

DATASETS = ("json", "folder", "hub")
TRACKERS = {
    "none": "",
    "wandb": '[wandb]\nproject = "p"\noffline = true\n',
    "trackio": '[trackio]\nproject = "p"\n',
    "tensorboard": "[tensorboard]\n",
}
MCP = ("command", "image")
OTHERS = ("verifiers", "file")
STORES = ("none", "s3")

GYM = """
system_prompt: Act.
parser: {use_thinking: false}
action_mappings: {act: {_tool: act, text: {from_arg: text}}}
files: server
defaults: {max_turns: 2}
"""
CONFIG = """
output_dir = "outputs/run"
max_steps = 1
max_async_level = 0
[model]
name = "tiny"
[orchestrator]
batch_size = 8
rollouts_per_example = 4
seq_len = 1024
zero_spread = "keep"
[orchestrator.sampling]
max_tokens = 6
[[orchestrator.env]]
"""
PROMISES = {
    "train": ("torch", "transformers", "peft", "asyncssh", "pathspec", "uvicorn"),
    "mcp": ("mcp", "regex", "jsonpath", "httpx2"),
    "hub": ("huggingface_hub", "pyarrow.parquet"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "tensorboard": ("torch.utils.tensorboard",),
    "s3": ("s3fs",),
}
IMPORT = """
import importlib, json, sys
asked = json.loads(sys.argv[1])
for name in asked["modules"]:
    importlib.import_module(name)
from buckeye.launch.preflight.software_checks import check_libraries
check = check_libraries(asked["extras"])
assert check.state == "ok", check.line
import importlib.util
assert not [name for name in asked["absent"] if importlib.util.find_spec(name.partition(".")[0])]
"""


@dataclass(frozen=True)
class Plan:
    """One combination; only environments of MCP servers have a dataset."""

    dataset: str | None
    tracker: str
    environment: str
    store: str

    def __str__(self) -> str:
        return f"{self.environment}, {self.dataset or '-'}, {self.tracker}, {self.store}"


PLANS = [
    Plan(*choice)
    for choice in (
        *itertools.product(DATASETS, TRACKERS, MCP, STORES),
        *itertools.product((None,), TRACKERS, OTHERS, STORES),
    )
]


class World:
    """A project for every plan, a hub, a store, an index of machines, and the software that these share."""

    def __init__(self, folder, hub, store):
        self.folder, self.hub, self.store = folder, hub, store
        self.project, self.software = folder / "project", folder / "software-of-pods"
        self.installed: dict[str, float] = {}
        self.port = free_port()
        self.project.mkdir()
        self.environments = folder / "environments"
        self._write()

    def _write(self):
        project = self.project
        size = TinySize(vocab_size=310, layers=1, hidden=64, max_length=2048)
        make_tiny_model(project / "tiny", texts=["say 1 2 3 4 5 6 7 8 9 a b c d"] * 20, size=size, seed=0)
        (project / "letters.py").write_text(ENVIRONMENT)
        (project / "gym.yaml").write_text(GYM)
        (project / "server").mkdir()
        (project / "server/raw_server.py").write_text(SERVER.read_text())
        image = {"url": f"http://localhost:{self.port}/mcp", "headers": {"Mcp-Image": "org/env:1"}}
        servers = {"command": {"command": "python3", "args": ["{workdir}/raw_server.py"]}, "image": image}
        self.trusted = []
        for name, given in servers.items():
            self._write_tasks(name, given)

    def _write_tasks(self, name, server):
        tasks = [
            {
                "id": f"task-{number}",
                "prompt": "Win.",
                "mcp_config": {"board": server},
                "setup_tool": {"name": "setup"},
                "evaluate_tool": {"name": "evaluate"},
            }
            for number in range(20)
        ]
        file, folder = self.project / f"{name}.json", self.project / f"data-{name}"
        file.write_text(json.dumps(tasks))
        write_dataset(folder, "tasks", {"train": read_tasks(file)})
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self.hub.files[f"{HUB}-{name}"] = files
        self.trusted.append(collect_task_resources(read_tasks(file)).digest)

    def install_verifiers(self):
        """Install a `verifiers` environment from a local wheel, in a separate interpreter."""
        code = (ROOT / "tests/workers/adapters/packages/sums_v0.py").read_text()
        code = code.replace("for_letters: bool = False", "for_letters: bool = True")
        made = wheel(self.folder, "sums-env", files={"sums_env.py": code}, requires=VERIFIERS)
        install_environment(InstallRequest(what=str(made)), report=lambda _: None)

    def write(self, plan):
        """Write the settings file of a run, named after its plan."""
        name = f"{self.project}/run-{PLANS.index(plan)}.toml"
        taskset = {"json": "{}.json", "folder": "data-{}", "hub": f"{HUB}-{{}}"}.get(plan.dataset or "", "")
        environment = {
            "verifiers": 'id = "sums-env"\n',
            "file": 'id = "letters.py"\n',
        }.get(
            plan.environment,
            'id = "buckeye-vf-gym"\n'
            f'args = {{ dataset = "{taskset.format(plan.environment)}", config_path = "gym.yaml" }}\n',
        )
        store = f'store = "s3://{BUCKET}/{PLANS.index(plan)}"\n' if plan.store == "s3" else ""
        text = CONFIG.replace("outputs/run", f"outputs/run-{PLANS.index(plan)}") + environment
        text += f"[trainer.ckpt]\ninterval = 1\n{store}[inference]\n{TRACKERS[plan.tracker]}"
        Path(name).write_text(text)
        return Path(name).name

    def extras(self, plan):
        return tuple(sorted({*EXTRAS, *extras_of(load_config(RLConfig, ["@", self.write(plan)]))}))

    def install(self, extras):
        """Install the requirements of a run with these extras where machines look; return the Python."""
        step = next(one for one in setup_steps(extras=extras) if one.title == "packages")
        place = self.software / "software" / f"packages-{step.key}"
        python = place / "bin/python"
        if step.key in self.installed:
            return python
        started = time.monotonic()
        needed = sorted({*requirements(extras), *TOOLS, "pip"})
        bounds = self.folder / f"{step.key}.txt"
        bounds.write_text("\n".join([*pinned_requirements(needed), f"torch=={metadata.version('torch')}"]))
        uv = find_uv()
        links = ["--find-links", os.environ["PIP_FIND_LINKS"]] if "PIP_FIND_LINKS" in os.environ else []
        subprocess.run([uv, "venv", "-q", "--python", sys._base_executable, place], check=True)
        install = [uv, "pip", "install", "-q", "--python", python, "--link-mode", "hardlink", *links]
        subprocess.run([*install, "-c", bounds, *needed], check=True)
        (self.software / "software/done").mkdir(exist_ok=True)
        (self.software / f"software/done/packages-{step.key}").touch()
        self.installed[step.key] = time.monotonic() - started
        return python


@pytest.fixture(scope="module")
def world(tmp_path_factory, server):
    folder = tmp_path_factory.mktemp("world")
    with FakeHub() as hub, pytest.MonkeyPatch.context() as patch:
        for name in ("HF_TOKEN", "WANDB_API_KEY", "BUCKEYE_API_KEY", "HF_HUB_OFFLINE"):
            patch.delenv(name, raising=False)
        made = World(folder, hub, server)
        values = {**server, ENVIRONMENTS_VARIABLE: made.environments, "HF_ENDPOINT": hub.url}
        values |= {"HF_HOME": folder / "hf", TRUSTED_VARIABLE: ",".join(made.trusted)}
        for name, value in values.items():
            patch.setenv(name, str(value))
        import huggingface_hub.constants as constants

        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hf/hub"))
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.chdir(made.project)
        made.install_verifiers()
        yield made


def expected(plan):
    """Return the extras that a combination needs, listed by hand."""
    found = {*EXTRAS, "model"} | ({"hub"} if plan.dataset in ("folder", "hub") else set())
    found |= {plan.tracker, plan.store} - {"none"}
    return tuple(sorted(found))


def test_the_requirements_of_every_combination_are_computed(world):
    sets = {plan: world.extras(plan) for plan in PLANS}
    assert sets == {plan: expected(plan) for plan in PLANS}
    assert (len(PLANS), len(set(sets.values()))) == (64, 16)


def test_each_set_of_requirements_is_installed_once_and_keeps_its_promise(world):
    for extras in sorted({expected(plan) for plan in PLANS}):
        python = world.install(extras)
        absent = [name for extra in PROMISES if extra not in extras for name in PROMISES[extra][:1]]
        absent = [name for name in absent if name not in ("huggingface_hub", "torch.utils.tensorboard")]
        asked = {
            "modules": [name for extra in extras for name in PROMISES.get(extra, ())],
            "extras": extras,
            "absent": absent,
        }
        env = {"PATH": "/usr/bin:/bin", "HOME": str(world.folder), "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            [python, "-c", IMPORT, json.dumps(asked)], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{extras}: {done.stderr}"
    print({key: f"{seconds:.0f} s" for key, seconds in world.installed.items()})
    assert len(world.installed) == 16


class Pods:
    """Fake provider whose pods are ssh servers on the loopback."""

    def __init__(self, world):
        self._world, self._stack = world, contextlib.ExitStack()
        self.landlord = Landlord(active_after=0.0, ready_after=0.0, start_pod=self._start, end_pod=self._end)

    def __enter__(self):
        url = self._stack.enter_context(serve(self.landlord))
        self.environment = {"PRIME_API_BASE_URL": url, "PRIME_API_KEY": KEY}
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _start(self, pod):
        folder = self._world.folder / "pods" / secrets.token_hex(4)
        docker = folder / "bin/docker"
        docker.parent.mkdir(parents=True)
        (folder / "docker").mkdir()
        docker.write_text(
            FAKE.format(python=sys._base_executable, home=str(folder / "docker"), server=str(SERVER))
        )
        docker.chmod(0o755)
        asked = pod["_order"]["sshKeyId"]
        authorized = next(key["publicKey"] for key in self.landlord.keys if key["id"] == asked)
        more = {
            "BUCKEYE_HOME": self._world.software,
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": self._world.hub.url,
            "OMP_NUM_THREADS": "1",
        }
        host = self._stack.enter_context(sshd(folder, authorized=authorized, more=more))
        return f"root@127.0.0.1 -p {host.target.port}"

    def _end(self, pod):
        pass


@pytest.fixture(scope="module")
def drawn():
    """Ten random combinations; BUCKEYE_TESTS_SEED repeats a choice."""
    seed = int(os.environ.get("BUCKEYE_TESTS_SEED", secrets.randbelow(10**6)))
    print(f"BUCKEYE_TESTS_SEED={seed}")
    return random.Random(seed).sample(PLANS, RUNS)


@pytest.mark.parametrize("number", range(RUNS))
def test_a_combination_drawn_at_random_runs_to_its_end(world, drawn, number):
    plan = drawn[number]
    print(plan)
    file, index = world.write(plan), PLANS.index(plan)
    world.install(expected(plan))
    home = world.folder / "homes" / str(index)
    home.mkdir(parents=True)
    dropped = ("PRIME_", "PYTEST")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    with Pods(world) as pods:
        done = subprocess.run(
            [sys.executable, "-m", "buckeye", "rl", "@", file, *WORDS],
            env={
                **kept,
                **pods.environment,
                "HOME": str(home),
                "BUCKEYE_HOME": str(home),
                "HF_HUB_OFFLINE": "0",
            },
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        said = f"{plan}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, said
        assert pods.landlord.alive == [], said
    output = world.project / "outputs" / f"run-{index}"
    assert [info.step for info in list_checkpoints(output / "checkpoints")] == [1], said
    if plan.tracker != "none":
        assert any((output / plan.tracker).rglob("*")), said
    if plan.store == "s3":
        assert [info.step for info in CheckpointStore(f"s3://{BUCKET}/{index}").list_checkpoints()] == [1], (
            said
        )
