"""`buckeye rl export`: the files as they should be, and that those they are for accept them."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml
from packages.machines.tests.kuberay import RAYJOB
from packages.machines.tests.venvs import venv_with

from buckeye import __version__
from buckeye.errors import UsageError
from buckeye.sizing.devices import GPU_MEMORY_GB, Gpus
from buckeye_machines.export.command import sky_task, unsaid_by_sky
from buckeye_machines.export.job import read_job
from buckeye_machines.export.k8s import k8s_manifests, rayjob_manifests, unsaid_by_k8s, unsaid_by_rayjob

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
    server = '{"url": "https://find.example/mcp", "headers": {"Authorization": "Bearer ${FIND_KEY}"}}'
    task = f'{{"prompt": "Wašté", "mcp_config": {{"find": {server}}}, "evaluate_tool": {{"name": "end"}}}}'
    (tmp_path / "tasks" / "tasks.json").write_text(f"[{task}]\n")
    (tmp_path / "gym.yaml").write_text("  indented: first line\r\nother: [1, 2]  \n\n")
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "nodes.toml").write_text(CONFIG + "\n[cluster]\nnodes = 3\n")
    return tmp_path


@pytest.fixture
def run(run_rl):
    """Carry out `rl export WORDS`: exit code, stdout, stderr."""
    return functools.partial(run_rl, "export")


@pytest.mark.parametrize(
    ("words", "golden"),
    [
        (["sky", "run.toml", "--gpus", "2xA100"], "sky.yaml"),
        (["k8s", "run.toml"], "k8s.yaml"),
        (["sky", "nodes.toml", "--gpus", "2xA100"], "sky_nodes.yaml"),
        (["rayjob", "nodes.toml", "--gpus", "2xA100_80GB"], "rayjob.yaml"),
    ],
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
    several = yaml.safe_load(run("sky", "nodes.toml")[1])
    config_map = next(yaml.safe_load_all(run("k8s", "run.toml")[1]))
    of_rayjob = next(yaml.safe_load_all(run("rayjob", "nodes.toml")[1]))["data"]
    scripts = [task["setup"], task["run"], several["setup"], several["run"], config_map["data"]["start.sh"]]
    for script in (*scripts, of_rayjob["install.sh"], of_rayjob["start.sh"]):
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
        (("gym.yaml", "tasks"), ["k8s"], "tasks is a folder"),
        (("[model]", "[cluster]\nnodes = 2\n[model]"), ["k8s"], "buckeye rl export rayjob run.toml"),
        (("gym.yaml", "big.yaml"), ["k8s"], "more than a ConfigMap can hold"),
        (("gym.yaml", "gym.bin"), ["k8s"], "gym.bin cannot be read as text"),
        (("batch_size", "batch_sise"), ["sky"], "batch_sise"),
        (
            ("max_steps", 'output_dir = "x\\nrun: touch ran"\nmax_steps'),
            ["sky"],
            "output_dir is 'x\\nrun: touch ran'",
        ),
        (
            ("max_steps", 'output_dir = "x\\nrun: touch ran"\nmax_steps'),
            ["k8s"],
            "no file of another program",
        ),
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


CHANGED = {
    "name": "buckeye-another",
    "config": Path("gym.yaml"),
    "nodes": 5,
    "gpus": Gpus(3),
    "disk_gb": 4444,
    "output_dir": "runs/another",
    "environments": ("org/another",),
    "files": (Path("another.json"),),
    "keys": ("ANOTHER_KEY",),
}
FORMATS = {
    "sky": (sky_task, unsaid_by_sky),
    "k8s": (functools.partial(k8s_manifests, image="python:3.12"), unsaid_by_k8s),
    "rayjob": (functools.partial(rayjob_manifests, image="rayproject/ray:2.52.0"), unsaid_by_rayjob),
}
NOT_WRITTEN = {("sky", "files"): "workdir: .\n"}  # all of the folder is copied


@pytest.mark.parametrize("system", FORMATS)
def test_every_field_of_the_job_is_in_the_file(project, system):
    """One that is added has to be added to CHANGED, and then to the files."""
    (project / "another.json").write_text("[]")
    write, _ = FORMATS[system]
    job = read_job(Path("run.toml"), None)
    assert set(CHANGED) == {field.name for field in dataclasses.fields(job)}
    for name, value in CHANGED.items():
        if (system, name) == ("k8s", "nodes"):
            with pytest.raises(UsageError, match="for one machine"):
                write(dataclasses.replace(job, nodes=value))
            continue
        other = write(dataclasses.replace(job, **{name: value}))
        if (system, name) in NOT_WRITTEN:
            assert NOT_WRITTEN[system, name] in other
        else:
            assert other != write(job), f"{name} is not in the file"


@pytest.mark.parametrize("system", FORMATS)
def test_every_type_of_gpu_is_in_the_file_or_said_to_be_left_out(project, system):
    """Two types may make one file only if the person is told."""
    write, unsaid = FORMATS[system]
    job = read_job(Path("run.toml"), None)
    texts = {}
    for name in GPU_MEMORY_GB:
        one = dataclasses.replace(job, gpus=Gpus(2, name))
        texts.setdefault(write(one), []).append(name)
        if write(one) == write(job):
            assert name in unsaid(one)[0]
    for names in texts.values():
        for name in names:
            notes = unsaid(dataclasses.replace(job, gpus=Gpus(2, name)))
            assert len(names) == 1 or len(notes) == 1


def test_every_node_of_a_rayjob_is_alike_and_sees_the_same_volume(project, run):
    _, volume, job = yaml.safe_load_all(run("rayjob", "nodes.toml")[1])
    cluster = job["spec"]["rayClusterSpec"]
    (others,) = cluster["workerGroupSpecs"]
    assert others["template"] == cluster["headGroupSpec"]["template"]
    assert {others[name] for name in ("replicas", "minReplicas", "maxReplicas")} == {2}
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]
    assert job["spec"]["entrypointNumGpus"] == 2


@pytest.mark.parametrize("config", ["run.toml", "nodes.toml"])
def test_a_rayjob_is_what_kuberay_defines(project, run, config):
    job = list(yaml.safe_load_all(run("rayjob", config, "--gpus", "2xH100")[1]))[-1]
    jsonschema.validate(job, RAYJOB)
    job["spec"]["backoffLimits"] = job["spec"].pop("backoffLimit")
    with pytest.raises(jsonschema.ValidationError, match="backoffLimits"):
        jsonschema.validate(job, RAYJOB)


def test_the_type_of_the_gpus_reaches_kubernetes(project, run):
    _, out, err = run("k8s", "run.toml", "--gpus", "2xA100_40GB")
    pod = list(yaml.safe_load_all(out))[-1]["spec"]["template"]["spec"]
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"][0]["values"] == ["NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"]
    assert "nvidia.com/gpu.product" in err
    _, out, err = run("k8s", "run.toml", "--gpus", "2xP100")
    assert "affinity" not in list(yaml.safe_load_all(out))[-1]["spec"]["template"]["spec"]
    assert "not for P100_16GB" in err


def test_a_run_on_the_processor_asks_for_no_gpus(project, run):
    (project / "run.toml").write_text(
        CONFIG.replace("[trainer.optim]", '[trainer.model]\ndevice = "cpu"\n[trainer.optim]')
    )
    assert "accelerators" not in yaml.safe_load(run("sky", "run.toml")[1])["resources"]
    job = list(yaml.safe_load_all(run("k8s", "run.toml")[1]))[-1]
    assert "resources" not in job["spec"]["template"]["spec"]["containers"][0]


def test_keys_of_the_tasks_servers_are_asked_for(project, run):
    task = yaml.safe_load(run("sky", "run.toml")[1])
    assert "FIND_KEY" in task["secrets"]
    assert "PRIME_API_KEY" not in task["secrets"]  # which could rent and end everything


def test_a_run_outside_of_the_folder_does_not_travel(project, run, monkeypatch):
    monkeypatch.chdir(project / "tasks")
    code, _, err = run("sky", "../run.toml")
    assert code == 2
    assert "not in the folder" in err


@pytest.mark.slow
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
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("buckeye-run {'A100-80GB': 2} 200 ['BUCKEYE_API_KEY'")
    run("sky", "nodes.toml", "-o", "nodes.yaml")
    code = (
        "import sys, sky; t = sky.Task.from_yaml_config(__import__('yaml').safe_load(open('nodes.yaml')), "
        "secrets_overrides=[('RAY_AUTH_TOKEN', 'x')]); print(t.num_nodes, t.envs)"
    )
    done = subprocess.run(
        [programs / "python", "-c", code],
        env={"HOME": str(project), "PATH": "/usr/bin:/bin", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("3 {'RAY_AUTH_MODE': 'token'")


@pytest.mark.slow
def test_the_manifests_are_what_kubernetes_defines(project, run):
    programs = venv_with("kubernetes-validate", "kubernetes-validate==1.34.1", "setuptools<81")
    run("k8s", "run.toml", "--gpus", "2xH100", "-o", "job.yaml")
    validate = [programs / "kubernetes-validate", "--strict", "-k", "1.34"]
    done = subprocess.run([*validate, "job.yaml"], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (project / "job.yaml").read_text()
    (project / "wrong.yaml").write_text(text.replace("backoffLimit: 5", "backoffLimits: 5"))
    done = subprocess.run([*validate, "wrong.yaml"], cwd=project, capture_output=True, text=True)
    assert done.returncode != 0
    *others, job = yaml.safe_load_all(run("rayjob", "nodes.toml", "--gpus", "2xH100")[1])
    pod = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]
    of_pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "node"}, "template": pod}
    (project / "rayjob.yaml").write_text(yaml.safe_dump_all([*others, of_pod]))
    done = subprocess.run([*validate, "rayjob.yaml"], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
