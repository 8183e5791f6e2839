"""The example files for Kubernetes and SkyPilot."""

import re
import subprocess

import pytest
import yaml
from tests.places import ROOT
from tests.remote.venvs import venv_with

from buckeye.cli.tree import BY_WORDS, GROUPS
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig

JOB = ROOT / "examples" / "kubernetes" / "job.yaml"
TASK = ROOT / "examples" / "skypilot" / "task.yaml"
KEYS = {"HF_TOKEN", "WANDB_API_KEY"}


@pytest.fixture
def manifests():
    return list(yaml.safe_load_all(JOB.read_text()))


@pytest.fixture
def task():
    return yaml.safe_load(TASK.read_text())


@pytest.fixture
def scripts(manifests, task):
    return [task["setup"], task["run"], manifests[0]["data"]["start.sh"]]


def test_the_job_mounts_the_volumes_of_its_file_and_asks_for_the_gpus_of_its_run(manifests, task):
    files, volume, job = manifests
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes["project"]["configMap"]["name"] == files["metadata"]["name"]
    assert volumes["output"]["persistentVolumeClaim"]["claimName"] == volume["metadata"]["name"]
    mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert set(mounted) == set(volumes)
    assert container["command"] == ["bash", f"{container['workingDir']}/start.sh"]
    assert container["workingDir"] == mounted["project"]
    assert f"--output-dir {mounted['output']}/" in files["data"]["start.sh"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert {*task["resources"]["accelerators"].values()} == {2}
    assert (set(task["secrets"]), task["workdir"]) == (KEYS, ".")


@pytest.mark.parametrize("system", ["kubernetes", "skypilot"])
def test_the_run_of_an_example_is_valid(manifests, system, tmp_path):
    path = TASK.with_name("run.toml")
    if system == "kubernetes":
        path = tmp_path / "run.toml"
        path.write_text(manifests[0]["data"]["run.toml"])
    config = load_config(RLConfig, ["@", str(path)])
    assert max(*config.inference_gpu_ids, *config.trainer_gpu_ids) == 1
    assert config.trainer.ckpt is not None


def test_the_scripts_are_valid_shell_of_commands_that_exist(scripts):
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        for line in re.findall(r"\bbuckeye ([a-z]+(?: [a-z]+)?)", script):
            assert line in BY_WORDS.keys() | GROUPS.keys()
    assert sum("exec rl @ run.toml" in script for script in scripts) == 2


@pytest.mark.parametrize("resumed", [False, True])
def test_a_started_run_is_resumed(task, resumed, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "rl").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tools / "rl").chmod(0o755)
    if resumed:
        (tmp_path / "outputs").mkdir()
        (tmp_path / "outputs" / "run.json").write_text("{}")
    done = subprocess.run(
        ["bash"],
        input=task["run"],
        text=True,
        capture_output=True,
        env={"HOME": str(tmp_path), "PATH": f"{tools}:/usr/bin:/bin"},
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout.split() == ["@", "run.toml", *(["--resume"] if resumed else [])]


@pytest.mark.slow
def test_the_manifests_are_what_kubernetes_defines(tmp_path):
    programs = venv_with("kubernetes-validate", "kubernetes-validate==1.34.1", "setuptools<81")
    validate = [programs / "kubernetes-validate", "--strict", "-k", "1.34"]
    done = subprocess.run([*validate, JOB], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(JOB.read_text().replace("backoffLimit: 5", "backoffLimits: 5"))
    done = subprocess.run([*validate, wrong], capture_output=True, text=True)
    assert done.returncode != 0
