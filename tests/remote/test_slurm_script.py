"""The script that Slurm gets, letter by letter, and how the command asks for it."""

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from buckeye.cli import slurm as command
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import ConfigError, RunError, UsageError
from buckeye.launch.slurm.script import Component, Container, SlurmJob, exported, slurm_script, slurm_time

GOLDEN = Path(__file__).parent / "golden_job.sh"
RUN = """
output_dir = "outputs/my run"
[model]
name = "org/model"
[trainer]
[orchestrator]
[[orchestrator.env]]
id = "letters.py"
[inference]
"""


def load(words):
    return load_config(RLConfig, list(words))


def start(words, load, carry_out_run=None):
    return command.launch(words, load, carry_out_run)


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


@pytest.fixture
def sbatch(project, monkeypatch):
    """What would submit; it writes down its words and variables."""
    folder = project / "bin"
    folder.mkdir()
    program = folder / "sbatch"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > words\nenv > variables\necho "42;cluster"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return project


def test_the_script_is_this_one():
    job = SlurmJob(
        settings=("@", "run.toml", "--max-steps", "7"),
        output_dir=Path("/srv/my runs/one"),
        folder=Path("/work"),
        components=(Component(nodes=4, partition="gpu", gres="gpu:h100:8"),),
        account="lab",
        time="04:00:00",
        cpus=64,
        options=("--constraint=ib",),
        python="/opt/venv/bin/python",
    )
    assert slurm_script(job) == GOLDEN.read_text()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_understands_it():
    subprocess.run(["bash", "-n", GOLDEN], check=True, timeout=30)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("90m", "01:30:00"), ("4h", "04:00:00"), ("2d", "2-00:00:00"), ("36h", "1-12:00:00")]
    + [(same, same) for same in ("00:12:00", "04:00:00", "1-12", "2-00:00")],
)
def test_time_limits(given, meant):
    assert slurm_time(given) == meant


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("4 hours", "90m, 4h, 2d"),
        ("12", "minutes to Slurm, and hours to many. Write 12m or 12h"),
        ("1:30", "hours and minutes to many. Write 00:1:30 or 1:30:00"),
        ("0", "0 for no limit"),
        ("0h", "0 for no limit"),
        ("00:00:00", "0 for no limit"),
    ],
)
def test_a_time_limit_that_is_wrong_or_may_be_misread_is_refused(given, said):
    with pytest.raises(UsageError, match=said):
        slurm_time(given)


def test_what_looks_like_a_key_does_not_go_with_the_job():
    names = ["PATH", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET", "DB_PASSWORD", "LANG", "my_token"]
    assert exported(names) == ["PATH", "LANG"]


def test_a_dry_run_prints_and_writes_nothing(project, capsys):
    words = ["@", "run.toml", "--launcher", "slurm", "--nodes", "2", "--dry-run", "--sbatch=--qos=high"]
    assert start(words, load) == 0
    said = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in said
    assert "#SBATCH --exclusive\n" in said
    assert "#SBATCH --gres=gpu:2\n" in said
    assert "#SBATCH --qos=high\n" in said
    assert "settings=(@ run.toml)" in said
    assert not (project / "outputs").exists()


def test_a_job_is_submitted_without_keys(sbatch, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert start(["@", "run.toml", "--launcher=slurm", "--max-steps", "3"], load) == 0
    files = sbatch / "outputs" / "my run" / "slurm"
    assert (sbatch / "words").read_text() == f"--parsable\n{files}/job.sh\n"
    assert "hf_secret" not in (sbatch / "variables").read_text() + (files / "job.sh").read_text()
    assert (files / "keys").read_text() == "HF_TOKEN=hf_secret\n"
    assert (files / "keys").stat().st_mode & 0o777 == 0o600
    assert "settings=(@ run.toml --max-steps 3)" in (files / "job.sh").read_text()
    said = capsys.readouterr().out
    assert "Submitted job 42." in said
    assert f"tail -f '{files}/" in said  # with a space in it, to be pasted
    assert "buckeye rl stop 'outputs/my run'" in said
    assert "hf_secret" not in said


def test_a_run_that_is_there_is_not_begun_again(sbatch):
    (sbatch / "outputs" / "my run").mkdir(parents=True)
    (sbatch / "outputs" / "my run" / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="already holds a run"):
        start(["@", "run.toml", "--launcher", "slurm"], load)
    assert start(["@", "run.toml", "--launcher", "slurm", "--resume"], load) == 0


def test_what_slurm_says_is_said(sbatch):
    (sbatch / "bin" / "sbatch").write_text("#!/bin/sh\necho no such partition >&2\nexit 1\n")
    with pytest.raises(RunError, match="Slurm did not take the job: no such partition"):
        start(["@", "run.toml", "--launcher", "slurm"], load)


def test_without_slurm_it_is_said(project, monkeypatch):
    monkeypatch.setenv("PATH", str(project))
    with pytest.raises(UsageError, match="no sbatch here"):
        start(["@", "run.toml", "--launcher", "slurm"], load)


def test_a_misspelt_launcher_is_refused(project):
    with pytest.raises(ConfigError, match="slurm"):
        start(["@", "run.toml", "--launcher", "slrum"], load)


def test_every_field_of_the_job_is_in_the_script():
    """One that is added has to be added here, and then to the script."""
    node = Component(nodes=1)
    job = SlurmJob(settings=("@", "run.toml"), output_dir=Path("/o"), folder=Path("/f"), components=(node,))
    changed = {
        "settings": ("@", "another.toml"),
        "output_dir": Path("/another"),
        "folder": Path("/another"),
        "components": (node, node),
        "account": "another",
        "time": "01:00:00",
        "cpus": 3,
        "options": ("--another",),
        "container": Container(image="another"),
        "python": "/another",
    }
    assert set(changed) == {field.name for field in dataclasses.fields(SlurmJob)}
    for name, value in changed.items():
        other = slurm_script(dataclasses.replace(job, **{name: value}))
        assert other != slurm_script(job), f"{name} is not in the script"
    for other in (Component(nodes=2), Component(nodes=1, partition="p"), Component(nodes=1, gres="gpu:1")):
        assert slurm_script(dataclasses.replace(job, components=(other,))) != slurm_script(job)


NODES = ("--cluster.nodes", "3", "--cluster.inference-nodes", "0", "--cluster.trainer-nodes", "1,2")


def directives(capsys, *words):
    assert start(["@", "run.toml", "--launcher", "slurm", "--dry-run", *words], load) == 0
    script = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=30)
    return script, [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line]


def test_samplers_and_trainers_can_have_nodes_of_two_kinds(project, capsys):
    words = ("--partition", "big", "--gpus", "8xH100", "--inference-partition", "small")
    script, asked = directives(capsys, *NODES, *words, "--inference-gpus", "4xL40S", "--account", "lab")
    first, second = asked[: asked.index("hetjob")], asked[asked.index("hetjob") + 1 :]
    assert {"--nodes=1", "--partition=small", "--gres=gpu:l40s:4", "--account=lab", "--requeue"} <= set(first)
    assert {"--nodes=2", "--partition=big", "--gres=gpu:h100:8", "--account=lab"} <= set(second)
    assert "nodes=3\n" in script


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--inference-gpus", "4"), "either inference or the trainer"),
        (
            (*NODES[:2], "--cluster.inference-nodes=1", "--cluster.trainer-nodes=0,2", "--inference-gpus=4"),
            "must follow each other",
        ),
        ((*NODES, "--inference-gpus", "4", "--apptainer", "x.sif"), "cannot be in containers"),
        (("--container-mounts", "/data"), "needs --container-image or --apptainer"),
        (("--container-image", "x", "--apptainer", "y"), "name one of them"),
    ],
)
def test_what_makes_no_job(project, words, said):
    with pytest.raises(UsageError, match=said):
        start(["@", "run.toml", "--launcher", "slurm", "--dry-run", *words], load)


def test_a_run_in_a_container_of_pyxis(project, capsys):
    words = ("--container-image", "org/buckeye:1", "--container-mounts", "/data,/hf:/mnt")
    script, _ = directives(capsys, *words)
    assert "--container-image=org/buckeye:1" in script
    assert f"{project}:{project},/data,/hf:/mnt" in script
    assert f"--container-workdir={project}" in script
    assert "ray.scripts" not in script
    assert "python=python\n" in script


def test_a_run_in_containers_of_several_nodes_is_a_ray_cluster(project, capsys):
    script, _ = directives(capsys, "--nodes", "2", "--apptainer", "run.sif")
    assert "srun --overlap --nodes=2 " in script
    assert "apptainer exec --nv '--bind=" in script
    assert "--cluster.engine ray" in script
    assert "--cluster.engine srun" not in script
    assert "ray.scripts.scripts start --head" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    node = re.search(r"^node='(.*?)'$", script, re.S | re.M)[1]
    subprocess.run(["bash", "-n"], input=node, text=True, check=True)


@pytest.mark.parametrize(
    ("gpus", "gres", "said"),
    [
        ("8", "gpu:8", ""),
        ("8xH100", "gpu:h100:8", ""),
        ("4xRTX_PRO_6000B", "gpu:rtx_pro_6000b:4", ""),
        ("4xA100_40GB", "gpu:a100:4", "Slurm may give A100_80GB, too"),
    ],
)
def test_the_gpus_that_are_asked_for(project, capsys, gpus, gres, said):
    assert start(["@", "run.toml", "--launcher", "slurm", "--gpus", gpus, "--dry-run"], load) == 0
    captured = capsys.readouterr()
    assert f"#SBATCH --gres={gres}\n" in captured.out
    assert captured.err.startswith("note: " if said else "")
    assert said in captured.err


def test_ray_is_what_its_settings_say(project):
    seen = []

    def carry_out_run(config, words):
        seen.append((config.cluster.engine, config.cluster.ray_address, config.cluster.nodes, words[:2]))
        return 7

    words = ["@", "run.toml", "--launcher", "ray", "--address", "10.0.0.1:6379", "--nodes", "2"]
    assert start(words, load, carry_out_run) == 7
    assert seen == [("ray", "10.0.0.1:6379", 2, ["@", "run.toml"])]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ray", "--partition", "gpu"), "--partition is of --launcher slurm"),
        (("slurm", "--address", "auto"), "--address is of --launcher ray"),
        (("local",), "leave it out"),
    ],
)
def test_words_of_another_launcher_are_refused(project, words, said):
    with pytest.raises(UsageError, match=said):
        start(["@", "run.toml", "--launcher", *words], load)
