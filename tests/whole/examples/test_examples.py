"""Examples run unchanged, and those for Kubernetes, SkyPilot and Slurm are valid."""

import os
import re
import runpy
import signal
import subprocess
import sys
import time

import pytest
import yaml
from tests.places import ROOT

from buckeye.cli.tree import BY_NAME, GROUPS
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.trainer.model.tiny import TinySize, make_tiny_model

EXAMPLES = ROOT / "examples"
JOB = EXAMPLES / "kubernetes" / "job.yaml"
TASK = EXAMPLES / "skypilot" / "task.yaml"
KEYS = {"HF_TOKEN", "WANDB_API_KEY"}


@pytest.mark.e2e
def test_rl_loop(tmp_path, monkeypatch, capsys):
    size = TinySize(vocab_size=320, layers=1, hidden=64, max_length=256)
    make_tiny_model(
        tmp_path / "tiny", texts=["Put only the form in <answer></answer>."] * 9, size=size, seed=0
    )
    words = ("--steps", "2", "--groups", "2", "--group-size", "2", "--max-tokens", "4")
    argv = ["rl_loop.py", str(tmp_path / "tiny"), *words, "--save", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(EXAMPLES / "rl_loop.py"), run_name="__main__")
    assert capsys.readouterr().out.count("| reward ") == 2
    assert (tmp_path / "out" / "model.safetensors").exists()


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
            assert line in BY_NAME.keys() | GROUPS.keys()
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


def start_job(tmp_path, python, nodes=2):
    (tmp_path / "python").write_text(f"#!/bin/bash\n{python}\n")
    (tmp_path / "scontrol").write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/scontrol.log\n')
    for name in ("python", "scontrol"):
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": str(nodes)}
    env = {
        **os.environ,
        **job,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "OUTPUT_DIR": str(tmp_path / "run"),
    }
    words = ["bash", EXAMPLES / "slurm" / "job.sh", "@", "run.toml"]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True, cwd=tmp_path)


def test_a_slurm_job_starts_a_run_on_its_nodes_and_resumes_one_that_is_there(tmp_path):
    command = f"-m buckeye rl @ run.toml --output-dir {tmp_path}/run"
    out, _ = start_job(tmp_path, 'echo "$@"; exit 3').communicate(timeout=30)
    assert out.splitlines()[1:] == [f"{command} --cluster.nodes 2 --cluster.engine srun"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    job = start_job(tmp_path, 'echo "$@"; exit 3', nodes=1)
    out, _ = job.communicate(timeout=30)
    assert out.splitlines()[1:] == [f"{command} --resume"]
    assert job.returncode == 3
    assert not (tmp_path / "scontrol.log").exists()


def test_before_its_time_is_over_the_run_is_stopped_and_the_job_queued_again(tmp_path):
    python = (
        f'if [ "$4" = stop ]; then touch {tmp_path}/stopped; exit; fi\n'
        f"touch {tmp_path}/started; while [ ! -e {tmp_path}/stopped ]; do sleep 0.05; done; exit 130"
    )
    job = start_job(tmp_path, python)
    deadline = time.monotonic() + 30
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=30)
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
