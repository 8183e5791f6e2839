"""`buckeye rl` on the parts of a run: what it finds, decides, refuses and writes, without a terminal."""

import importlib.machinery
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from tests.places import ROOT
from tests.run.fake_hub import FakeHub
from tests.setup.recipe.rl_project import CONFIG, LOCK, files, fill, task, write_model

from buckeye.cli import main, train
from buckeye.errors import UsageError
from buckeye.launch.preflight import devices as machine
from buckeye.mcp.tasks.dataset import write_dataset
from buckeye.mcp.tasks.task_schema import McpTask
from buckeye.run_files.directory import begin_attempt, locked

SEEN = machine._visible_gpus


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a configuration, tasks and a model, and a home of its own."""
    folder = tmp_path / "project"
    fill(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("buckeye.launch.preflight.devices._visible_gpus", tuple)
    return folder


@pytest.fixture
def rl(project, monkeypatch, capsys):
    """Run the command here: (exit code, stdout, stderr)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["rl", *words])
        with pytest.raises(SystemExit) as ended:
            main.rl()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def test_a_dry_run_shows_the_plan_and_the_file_and_writes_nothing(rl, project):
    before = files(project)
    code, out, err = rl("--dry-run")
    assert (code, err) == (0, "Nothing was written or started.\n")
    for line in (
        r"environment  my-env:latest \(configs/my-env.yaml: go, done\)",
        r"tasks        6 to train on, none held out \(tasks.json\)",
        r"model        tiny \(19,200 parameters, all of them trained\)",
        r"batch        32 rollouts: 4 tasks, each played 8 times; that needs at least 4 tasks",
        r"where        this machine; \d+ cores, no GPU",
        r"price        nothing",
    ):
        assert re.search(f"^{line}$", out, re.M), line
    written = tomllib.loads(out[out.index("output_dir =") :])
    assert written["model"] == {"name": "tiny"}
    assert written["inference"] == {}  # without the section no server is started
    assert files(project) == before


def test_the_plan_as_json_is_one_object(rl):
    code, out, _ = rl("--dry-run", "--json", "--max-steps", "9", "--orchestrator.batch-size=16")
    plan = json.loads(out)
    assert code == 0
    assert plan["batch"].startswith("16 rollouts: 2 tasks")
    assert plan["tasks"].startswith("6 to train on")
    assert (plan["file"], plan["dataset"]) == ("outputs/my-env/run.toml", "tasks.json")
    written = tomllib.loads(plan["text"])
    assert written["max_steps"] == 9
    assert "inference_gpu_ids" not in written
    assert rl("--trainer.seed", "3", "--dry-run")[0] == 0  # settings alone are added to such a run too


def test_it_writes_the_configuration_once_and_starts_it(rl, project, monkeypatch):
    started = []
    monkeypatch.setattr(train, "start", lambda config, command: started.append((config, command)) or 0)
    assert rl("--yes", "--quiet", "--trainer.optim.lr", "0.5")[:2] == (0, "")
    file = project / "outputs" / "my-env" / "run.toml"
    written = file.read_text()
    config, command = started[0]
    assert command == ["buckeye", "rl", "@", "outputs/my-env/run.toml"]
    assert config.trainer.optim.lr == tomllib.loads(written)["trainer"]["optim"]["lr"] == 0.5

    assert rl("--yes")[0] == 0  # the next one has a folder of its own
    assert (started[1][1][-1], file.read_text()) == ("outputs/my-env-2/run.toml", written)
    code, _, err = rl("--yes", "--output", "outputs/my-env")
    assert (code, len(started)) == (2, 2)
    assert "nothing is overwritten" in err

    write_model(project / "outputs" / "my-env" / "weights" / "step_2")
    plan = json.loads(rl("--dry-run", "--json")[1])
    assert tomllib.loads(plan["text"])["model"]["name"] == "tiny"  # not what a run has made of it

    rl("@", "outputs/my-env/run.toml", "--output-dir", "elsewhere")
    assert started[2][0].trainer == started[0][0].trainer.model_copy(update={"output_dir": Path("elsewhere")})


def test_a_run_that_cannot_begin_leaves_its_folder_free(rl, project, monkeypatch):
    def fail(*_):
        raise UsageError("there is no such model")

    before = files(project)
    monkeypatch.setattr(train, "start", fail)
    assert "run.toml: removed again, as the run did not begin\nerror: there is no such" in rl("--yes")[2]
    assert (files(project), (project / "outputs" / "my-env").exists()) == (before, False)


def test_the_same_words_again_after_a_run_that_reached_no_step_take_its_folder(rl, project, monkeypatch):
    folder = project / "outputs" / "my-env"
    monkeypatch.setattr(train, "start", lambda *_: begin_attempt(folder, resumed_step=None).attempt)
    assert rl("--yes", "--quiet", "--trainer.optim.lr", "0.5")[0] == 1
    assert rl("--yes", "--quiet", "--output", "outputs/my-env")[0] == 1
    assert rl("--yes", "--quiet")[0] == 1
    kept = list((folder / "earlier_starts").glob("*/run.toml"))
    assert (len(kept), sum("lr = 0.5" in file.read_text() for file in kept)) == (2, 1)
    with locked(folder):  # it goes on
        assert json.loads(rl("--dry-run", "--json")[1])["file"] == "outputs/my-env-2/run.toml"
        assert "nothing is overwritten" in rl("--yes", "--output", "outputs/my-env")[2]


def test_a_folder_that_was_taken_while_the_plan_was_read_is_not_written_to(rl, project, monkeypatch):
    def take(*_):
        (project / "outputs" / "my-env").mkdir(parents=True)
        (project / "outputs" / "my-env" / "run.toml").write_text("of another run")

    monkeypatch.setattr("buckeye.cli.from_flags.plan_text", take)
    code, _, err = rl("--yes")
    assert (code, "nothing is overwritten" in err) == (2, True)
    assert (project / "outputs" / "my-env" / "run.toml").read_text() == "of another run"


def test_a_folder_with_a_configuration_and_no_run_is_started_and_not_resumed(rl, project):
    (project / "kept").mkdir()
    (project / "kept" / "run.toml").write_text("max_steps = 1\n")
    code, _, err = rl("--output", "kept")
    assert (code, err.endswith("or start what is there\n  buckeye rl @ kept/run.toml\n")) == (2, True)
    (project / "kept" / "run.json").write_text("{}")
    assert rl("--output", "kept")[2].endswith("or go on with that run\n  buckeye rl resume kept\n")


def test_a_setting_that_does_not_fit_is_named_without_a_file_that_nobody_can_find(rl):
    assert "orchestrator.batch_size: of the run put together here" in rl("--orchestrator.batch-size", "3")[2]


def test_a_hosted_model_is_refused_with_the_command_that_evaluates_it(rl):
    code, out, err = rl("--model", "gpt-4o-mini", "--dataset", "my-org/my-tasks")
    assert (code, out) == (2, "")
    assert "cannot be trained here" in err
    assert (
        "  buckeye eval buckeye-vf-gym --model gpt-4o-mini --base-url https://api.openai.com/v1 "
        "--arg taskset=my-org/my-tasks --arg config_path=configs/my-env.yaml\n"
    ) in err


def test_gpus_that_are_not_here_are_refused_and_planned_in_a_dry_run(rl, project):
    (project / "configs" / "2048.yaml").write_text(CONFIG)
    code, _, err = rl("--config", "configs/2048.yaml", "--gpus", "4xH100")
    assert code == 2
    assert re.search(r"4xH100_80GB: this machine has no GPU, and \d+ cores", err)
    assert "--provider prime" in err
    code, out, err = rl("--config", "configs/2048.yaml", "--gpus", "4xH100", "--dry-run")
    assert code == 0
    written = tomllib.loads(out[out.index("output_dir =") :])
    assert (written["inference_gpu_ids"], written["trainer_gpu_ids"]) == ([0, 1, 2], [3])
    assert "this machine has no GPU" in err


def test_a_rented_machine_is_planned_with_its_price_to_come(rl):
    code, out, _ = rl("--gpus", "4xH100", "--provider", "prime", "--max-price", "9", "--dry-run")
    assert code == 0
    assert "4xH100_80GB, rented from Prime Intellect; GPU 0-2 sample, GPU 3 train" in out
    assert "shown before anything is rented; at most 9 $ an hour" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--provider", "prime"), "Add --gpus, as --gpus 2xA100"),
        (("--provider", "ssh"), "Add --host USER@HOST"),
        (("--provider", "aws"), "one of local, prime, ssh"),
        (("--datset", "x"), "Did you mean --dataset?"),
        (("--config", "run.toml"), "buckeye rl @ run.toml"),
        (("--config", "none.yaml"), "there is no file none.yaml"),
        (("--dataset", "none.json"), "there is no such file or folder"),
        (("--model", "./none"), "--model ./none: this is no folder with a model"),
        (("--max-price", "free"), "--max-price"),
        (("--gpus", "4xH100", "@", "run.toml"), "--gpus is for a run that is put together here"),
        (("--gpus", "2", "--provider", "prime"), "2 GPUs of which type? Write both, as --gpus 2xA100"),
        (("--max-price", "3"), "--max-price is for a run on another machine"),
        (("--yes", "--host", "me@there"), "--host is for a run on another machine"),
        (("--yes", "--clean"), "--clean: a new run has a folder of its own"),
        (("--yes", "--resume"), "buckeye rl resume RUN"),
        (("--yes", "--output-dir", "there"), "this flag is called --output"),
        (("--output", "tasks.json/run"), "tasks.json is a file. Name a folder"),
        (("--output", "."), "a run is there, and nothing is overwritten"),
        (("--dataset", ""), "--dataset is empty"),
        (("--model",), "--model: needs a value"),
        (("--yes", "what"), "unexpected argument 'what'"),
        (("statsu",), "Did you mean `buckeye rl status`?"),
        (("tasks.json",), "buckeye rl --dataset tasks.json"),
        (("run.toml",), "buckeye rl @ run.toml"),
        (("--dataset", "t.json", "@run.toml"), "--dataset is for a run that is put together here"),
    ],
)
def test_what_makes_no_sense_is_one_message_and_exit_code_2(rl, project, words, said):
    before = files(project)
    code, out, err = rl(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
    assert files(project) == before


def test_without_a_terminal_what_is_missing_or_not_clear_is_said_with_its_flag(rl, project):
    (project / "configs" / "other.yaml").write_text(CONFIG)
    assert "Add --config; there are: configs/my-env.yaml, configs/other.yaml" in rl()[2]
    (project / "configs" / "other.yaml").unlink()
    (project / "more_tasks.json").write_text("[]")
    assert "Add --dataset; there are: tasks.json, more_tasks.json" in rl()[2]
    (project / "more_tasks.json").unlink()
    write_model(project / "models" / "second")
    assert re.search("Add --model; there are: .*tiny", rl()[2])
    (project / "tasks.json").unlink()
    code, _, err = rl("--yes")
    assert (code, "there are no tasks here" in err) == (2, True)
    shutil.rmtree(project / "configs")
    code, _, err = rl("--yes")
    assert (code, "buckeye rl init my-env:latest" in err) == (2, True)
    assert files(project) == [f"{m}/{f}" for m in ("models/second", "tiny") for f in sorted(SHAPE_FILES)]


SHAPE_FILES = ("config.json", "model.safetensors")


def test_the_dataset_of_the_lock_file_is_taken(rl, project):
    (project / "buckeye.lock.yaml").write_text(
        LOCK + "primary_dataset:\n  name: held.json\n  task_count: 2\n  updated_at: '2024-01-01T00:00:00'\n"
    )
    held = [task(0), task(1, metadata={"split": "eval"})]
    (project / "held.json").write_text(json.dumps(held))
    _, out, _ = rl("--dry-run")
    assert "1 to train on, 1 held out (held.json)" in out
    evaluation = tomllib.loads(out[out.index("output_dir =") :])["orchestrator"]["eval"]
    assert (evaluation["interval"], evaluation["num_examples"]) == (20, 1)


def test_tasks_without_servers_become_a_dataset_on_the_image_of_the_lock_file(rl, project, monkeypatch):
    monkeypatch.setattr(train, "start", lambda config, command: 0)
    (project / "buckeye.lock.yaml").write_text(LOCK)
    bare = task(0)
    del bare["mcp_config"]
    (project / "tasks.json").write_text(json.dumps([bare]))
    assert "buckeye hf tasks.json --name my-env-tasks --no-push" in rl("--dry-run")[2]
    code, out, _ = rl("--yes", "--json")
    assert code == 0
    assert json.loads(out)["dataset"] == "my-env-tasks"
    assert (project / "my-env-tasks" / "data" / "train-00000-of-00001.parquet").exists()
    assert "name: my-env-tasks" in (project / "buckeye.lock.yaml").read_text()


def test_tasks_that_no_rollout_could_be_played_with_are_refused(rl, project):
    (project / "tasks.json").write_text(json.dumps([task(0, evaluate_tool={"name": "go"})]))
    code, _, err = rl("--yes")
    assert (code, "the model may not call the tool 'go'" in err) == (2, True)


@pytest.mark.slow
def test_tasks_of_the_hub_are_fetched_with_the_key_of_the_project(rl, project, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (project / ".env").write_text("HF_TOKEN=hf_of_the_project\n")
    write_dataset(
        tmp_path / "made", "my-org/my-tasks", {"train": [McpTask.model_validate(task(0))]}, replace=False
    )
    with FakeHub() as hub:
        hub.files["my-org/my-tasks"] = {
            str(path.relative_to(tmp_path / "made")): path.read_bytes()
            for path in (tmp_path / "made").rglob("*")
            if path.is_file()
        }
        env = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }

        def run(*words):
            return subprocess.run(
                [sys.executable, *words],
                env=os.environ | env,
                capture_output=True,
                text=True,
                check=False,
            )

        words = ("-m", "buckeye", "rl", "--json", "--model", "tiny", "--dataset")
        early = run(*words, "my-org/my-tasks", "--dry-run")
        assert (early.returncode, "nothing may be fetched (--dry-run" in early.stderr) == (2, True)
        assert not (tmp_path / "hf").exists()
        run("-c", "from buckeye.mcp.tasks.dataset import find_taskset; find_taskset('my-org/my-tasks')")
        done = run(*words, "my-org/my-tasks", "--dry-run")
        absent = run(*words, "my-org/none", "--yes")
        assert done.returncode == 0, done.stderr
        plan = json.loads(done.stdout)
        assert (plan["tasks"][:1], plan["dataset"]) == ("1", "my-org/my-tasks")
        assert hub.tokens == {"Bearer hf_of_the_project"}
        assert (absent.returncode, "does not give a dataset of that name" in absent.stderr) == (2, True)


@pytest.fixture
def remote(monkeypatch):
    """What was handed to the part that trains elsewhere: (file, request)."""
    handed = []
    module = types.ModuleType("buckeye.remote.launch")
    module.__spec__ = importlib.machinery.ModuleSpec("buckeye.remote.launch", None)
    module.run_remote = lambda path, request, **_: handed.append((path, request)) or 0
    monkeypatch.setitem(sys.modules, "buckeye.remote.launch", module)
    return handed


def test_a_run_elsewhere_gets_the_file_and_all_that_was_asked_for(rl, project, remote):
    words = ("--gpus", "2xA100", "--provider", "prime", "--max-price", "5", "--max-hours", "2", "--keep")
    assert rl(*words, "--yes")[0] == 0
    ((path, request),) = remote
    assert tomllib.loads((project / path).read_text())["trainer_gpu_ids"] == [1]
    assert (str(request.gpus), request.provider, request.yes, request.keep) == (
        "2xA100_80GB",
        "prime",
        True,
        True,
    )
    assert (request.max_price, request.max_hours, request.hosts) == (5, 2, ())

    words = ("--provider", "ssh", "--host", "me@there:2222", "--host", "you@here", "--identity-file", "key")
    assert rl("@", str(path), *words, "--yes")[0] == 0
    assert (remote[1][0], remote[1][1].hosts) == (path, ("me@there:2222", "you@here"))
    code, _, err = rl("@", str(path), *words, "--max-steps", "3")
    assert (code, len(remote), "put all settings into one file" in err) == (2, 2, True)


def test_an_image_that_is_only_here_is_not_sent_elsewhere(rl, project, remote):
    server = {"buckeye": {"url": "http://localhost:8765/mcp", "headers": {"Mcp-Image": "my-env:latest"}}}
    (project / "tasks.json").write_text(json.dumps([task(0, mcp_config=server)]))
    words = ("--gpus", "1xH100", "--provider", "prime")
    code, _, err = rl(*words, "--yes")
    assert (code, "buckeye env push --image REGISTRY/ORG/my-env:latest" in err) == (2, True)
    server["buckeye"]["headers"]["Mcp-Image"] = "org/my-env:latest"
    (project / "tasks.json").write_text(json.dumps([task(0, mcp_config=server)]))
    (project / "buckeye.lock.yaml").write_text(
        "image: org/my-env:latest\nbuilt_at: '2024-01-02T00:00:00+00:00'\n"
    )
    code, _, err = rl(*words)
    assert (code, err.endswith("Type\n  buckeye env push\n")) == (2, True)
    assert (remote, (project / "outputs").exists()) == ([], False)
    with (project / "buckeye.lock.yaml").open("a") as lock:
        lock.write("pushed_at: '2024-01-03T00:00:00+00:00'\n")
    assert (rl(*words)[0], len(remote)) == (0, 1)


def test_gpus_that_are_here_are_shared_out_by_their_own_numbers(rl, project, tmp_path, monkeypatch):
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    rows = "".join(f"{i}, GPU-{i}, NVIDIA H100 80GB HBM3, 81559, 81000\n" for i in range(4))
    smi.write_text(
        f"#!/bin/sh\ncase $1 in *uuid,name*) printf '{rows}';; *=index) printf '0\\n1\\n2\\n3\\n';; esac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("buckeye.launch.preflight.devices._visible_gpus", SEEN)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    written = tomllib.loads(json.loads(rl("--dry-run", "--json")[1])["text"])
    assert (written["inference_gpu_ids"], written["trainer_gpu_ids"]) == ([1], [3])
    one = tomllib.loads(json.loads(rl("--dry-run", "--json", "--gpus", "H100")[1])["text"])
    assert one["trainer_gpu_ids"] == [1]
    code, _, err = rl("--gpus", "4xH100")
    assert (code, "this machine has 2 x NVIDIA H100 80GB HBM3" in err) == (2, True)
    assert "this machine has 2 x NVIDIA H100 80GB HBM3" in rl("--gpus", "1xA100")[2]


def test_help_lists_the_flags_and_the_settings(rl):
    code, out, _ = rl("--help")
    assert code == 0
    for flag in ("--gpus", "--max-price", "--json", "--dry-run", "--orchestrator.batch-size"):
        assert re.search(rf"^  {flag} ", out, re.M), flag


@pytest.mark.slow
def test_it_trains_with_one_command(tmp_path):
    """The whole of it: environment, configuration, tasks and model are in the folder; nothing is said."""
    source = ROOT / "environments" / "text_2048"
    (tmp_path / "configs").mkdir()
    text = (source / "text_2048.yaml").read_text().replace("max_turns: 100", "max_turns: 2")
    (tmp_path / "configs" / "2048.yaml").write_text(text)
    shutil.copy(source / "tasks.json", tmp_path)
    run = [sys.executable, "-m", "buckeye"]
    tiny = ("model", "tiny", "tiny", "--corpus", "tasks.json", "--layers", "1", "--hidden", "64")
    subprocess.run([*run, *tiny], cwd=tmp_path, check=True)
    done = subprocess.run(
        [*run, "rl", "--yes", "--max-steps", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "outputs" / "2048" / "weights" / "step_2" / "model.safetensors").exists()
    assert (tmp_path / "outputs" / "2048" / "evals" / "step_2").is_dir()
    again = subprocess.run(
        [*run, "rl", "--dry-run", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(again.stdout)["file"] == "outputs/2048-2/run.toml"
