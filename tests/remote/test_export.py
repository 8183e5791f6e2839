"""`buckeye rl export`: the files as they should be, and that those they are for accept them."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest
import yaml

from buckeye import __version__
from tests.remote.venvs import venv_with

GOLDEN = Path(__file__).parent / "golden"
CONFIG = """\
max_steps = 20
inference_gpu_ids = [0]
trainer_gpu_ids = [1]

[model]
name = "nobody/no-such-model"

[trainer.optim]
lr = 1e-6

[orchestrator]
batch_size = 32

[[orchestrator.env]]
id = "buckeye-vf-gym"
args = { taskset = "tasks/tasks.json", config_path = "gym.yaml" }

[[orchestrator.env]]
id = "harleycooper/dakota1890"
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a run and the files that it names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tasks.json").write_text('[{"prompt": "Wašté"}]\n')
    (tmp_path / "gym.yaml").write_text("  indented: first line\r\nother: [1, 2]  \n\n")
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def run(run_rl):
    """Carry out `rl export WORDS`: exit code, stdout, stderr."""
    return functools.partial(run_rl, "export")


@pytest.mark.parametrize(
    ("words", "golden"),
    [(["sky", "run.toml", "--gpus", "2xA100"], "sky.yaml"), (["k8s", "run.toml"], "k8s.yaml")],
)
def test_the_files_are_as_they_were_reviewed(project, run, words, golden):
    code, out, _ = run(*words)
    assert code == 0
    assert out == (GOLDEN / golden).read_text().replace("VERSION", __version__)


def test_the_files_of_the_project_arrive_unchanged(project, run):
    config_map, _, job = yaml.safe_load_all(run("k8s", "run.toml")[1])
    volume = job["spec"]["template"]["spec"]["volumes"][0]["configMap"]
    arrived = {item["path"]: config_map["data"][item["key"]] for item in volume["items"]}
    assert set(arrived) == {"start.sh", "run.toml", "tasks/tasks.json", "gym.yaml"}
    for name in ("run.toml", "tasks/tasks.json", "gym.yaml"):
        assert arrived[name] == (project / name).read_bytes().decode()


def test_the_scripts_are_valid_shell(project, run):
    task = yaml.safe_load(run("sky", "run.toml")[1])
    config_map = next(yaml.safe_load_all(run("k8s", "run.toml")[1]))
    for script in (task["setup"], task["run"], config_map["data"]["start.sh"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_that_was_begun_goes_on(project, run, resumed):
    task = yaml.safe_load(run("sky", "run.toml")[1])
    tools = project / "bin"
    tools.mkdir()
    (tools / "rl").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tools / "rl").chmod(0o755)
    if resumed:
        (project / "outputs").mkdir()
        (project / "outputs" / "run.json").write_text("{}")
    environment = {"HOME": str(project), "PATH": f"{tools}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash"], input=task["run"], text=True, capture_output=True, env=environment, cwd=project, check=True
    )
    assert done.stdout.split() == ["@", "run.toml", *(["--resume"] if resumed else [])]


def test_without_a_type_there_are_several_to_choose_from(project, run):
    task = yaml.safe_load(run("sky", "run.toml")[1])
    assert task["resources"]["accelerators"] == {"H100": 2, "H200": 2, "A100-80GB": 2}


def test_a_file_that_is_there_is_not_overwritten(project, run):
    (project / "run.sky.yaml").write_text("mine")
    code, _, err = run("sky", "run.toml", "-o", "run.sky.yaml")
    assert (code, (project / "run.sky.yaml").read_text()) == (2, "mine")
    assert "run.sky.yaml exists" in err
    code, out, _ = run("sky", "run.toml", "-o", "new/run.sky.yaml")
    assert (code, out) == (0, "new/run.sky.yaml\n")
    assert yaml.safe_load((project / "new/run.sky.yaml").read_text())["name"] == "buckeye-run"


@pytest.mark.parametrize(
    ("change", "words", "reason"),
    [
        (("tasks/tasks.json", "/etc/passwd"), ["sky"], "/etc/passwd, which is outside"),
        (("tasks/tasks.json", "../x.json"), ["k8s"], "../x.json, which is outside"),
        (("tasks/tasks.json", "tasks"), ["k8s"], "tasks is a folder"),
        (("gym.yaml", "big.yaml"), ["k8s"], "more than a ConfigMap can hold"),
        (("gym.yaml", "gym.bin"), ["k8s"], "gym.bin cannot be read as text"),
        (("batch_size", "batch_sise"), ["sky"], "batch_sise"),
        (("[1]", "[7]"), ["sky", "--gpus", "2xA100"], "uses 8 devices"),
        (("", ""), ["sky", "--gpus", "2xQ100"], "Q100"),
    ],
)
def test_what_cannot_be_exported(project, run, change, words, reason):
    (project.parent / "x.json").write_text("[]")
    (project / "big.yaml").write_text("a" * 1_000_000)
    (project / "gym.bin").write_bytes(b"\xff\xfe")
    (project / "run.toml").write_text(CONFIG.replace(*change) if change[0] else CONFIG)
    code, out, err = run(words[0], "run.toml", *words[1:])
    assert (code, out) == (2, "")
    assert reason in err


def test_a_run_outside_of_the_folder_does_not_travel(project, run, monkeypatch):
    monkeypatch.chdir(project / "tasks")
    code, _, err = run("sky", "../run.toml")
    assert code == 2
    assert "not in the folder" in err


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_skypilot_reads_its_task(project, run):
    programs = venv_with("skypilot-0.14", "skypilot==0.14.1")
    run("sky", "run.toml", "--gpus", "2xA100", "-o", "task.yaml")
    code = (
        "import sky; t = sky.Task.from_yaml('task.yaml'); r = list(t.resources)[0]; "
        "print(t.name, dict(r.accelerators), r.disk_size, sorted(t.secrets))"
    )
    done = subprocess.run(
        [programs / "python", "-c", code],
        env={"HOME": str(project), "PATH": "/usr/bin:/bin", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        cwd=project,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("buckeye-run {'A100-80GB': 2} 200 ['BUCKEYE_API_KEY'")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_manifests_are_what_kubernetes_defines(project, run):
    programs = venv_with("kubernetes-validate", "kubernetes-validate==1.34.1", "setuptools<81")
    run("k8s", "run.toml", "-o", "job.yaml")
    validate = [programs / "kubernetes-validate", "--strict", "-k", "1.34"]
    done = subprocess.run([*validate, "job.yaml"], cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (project / "job.yaml").read_text()
    (project / "wrong.yaml").write_text(text.replace("backoffLimit: 5", "backoffLimits: 5"))
    done = subprocess.run([*validate, "wrong.yaml"], cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
