"""`buckeye rl` from the parts of a run, without a terminal: choices, refusals and written files."""

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
from tests.setup.recipe.rl_project import CONFIG, LOCK, files, fill, task, write_model

from buckeye.base.columns import counted
from buckeye.cli import train
from buckeye.errors import RemoteError, UsageError
from buckeye.launch.preflight import devices as machine
from buckeye.launch.preflight.check import failed, warning
from buckeye.run_files.directory import begin_attempt, lock_directory
from buckeye.run_files.known_runs import RemoteJob, RemoteRun, write_remote_run
from buckeye.setup.recipe.flags import parse_train_args

SEEN = machine._visible_gpus


def plan_of(out):
    """Return the lines about the run, without those about this machine."""
    lines = out.splitlines()
    return [re.sub(r"\d+ cores", "N cores", line) for line in lines if not line.startswith("disk")]


def test_a_dry_run_shows_the_plan_and_writes_nothing(rl, planned, project, wording):
    before = files(project)
    code, out, err = rl("--dry-run")
    assert (code, err) == (0, "Nothing was written or started.\n")
    assert plan_of(out) == wording
    written = planned()
    assert written["model"] == {"name": "tiny"}
    assert "inference" not in written  # without this section the servers have their defaults
    assert files(project) == before


def test_a_run_as_model_is_its_newest_weights(rl, planned, project):
    write_model(project / "old-run" / "weights" / "step_3")
    assert planned("--model", "old-run")["model"] == {"name": "old-run/weights/step_3"}
    assert "old-run/weights/step_3" in rl("--dry-run", "--model", "old-run")[1]


def test_an_adapter_as_model_has_the_size_of_its_base(rl, planned, project):
    (project / "adapter").mkdir()
    base = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": str(project / "tiny")}
    (project / "adapter" / "adapter_config.json").write_text(json.dumps(base))
    assert planned("--model", "adapter")["model"] == {"name": "adapter"}
    sizes = [
        re.findall(r"[\d,]+ parameters", rl("--dry-run", "--model", name)[1]) for name in ("adapter", "tiny")
    ]
    assert sizes[0] == sizes[1] != []


def test_a_dry_run_of_a_start_that_would_fail_ends_with_2(rl, monkeypatch):
    checks = [
        failed("tokenizer", "the model has none", "copy it"),
        warning("model", "is untrained", "train it"),
    ]
    monkeypatch.setattr("buckeye.cli.dry_run.run_preflight_checks", lambda *_: checks)
    for words in ((), ("--json",), ("--quiet",)):
        code, _, err = rl("--dry-run", *words)
        assert code == 2
        assert err.splitlines()[:2] == [f"warning: {checks[1].line}", f"error: {checks[0].line}"]


def test_the_plan_as_json_is_one_object(rl, wording):
    code, out, _ = rl("--dry-run", "--json", "--max-steps", "9", "--orchestrator.batch-size=16")
    plan = json.loads(out)
    assert code == 0
    assert (plan["batch"], plan["tasks"]) == wording
    assert (plan["file"], plan["dataset"]) == ("outputs/my-env/run.toml", "tasks.json")
    written = tomllib.loads(plan["text"])
    assert written["max_steps"] == 9
    assert "inference_gpu_ids" not in written
    assert rl("--trainer.seed", "3", "--dry-run")[0] == 0  # settings alone are added to such a run too


def test_it_writes_the_configuration_once_and_starts_it(rl, project, monkeypatch, wording):
    started = []
    monkeypatch.setattr(train, "start", lambda config, command, *_: started.append((config, command)) or 0)
    assert rl("--yes", "--quiet", "--trainer.optim.lr", "0.5")[:2] == (0, "")
    file = project / "outputs" / "my-env" / "run.toml"
    written = file.read_text()
    config, command = started[0]
    assert command == ["buckeye", "rl", "@", "outputs/my-env/run.toml"]
    assert config.trainer.optim.lr == tomllib.loads(written)["trainer"]["optim"]["lr"] == 0.5

    code, out, _ = rl("--yes")  # the next run has another folder
    assert (code, out.splitlines()[-1]) == (0, wording)
    assert (started[1][1][-1], file.read_text()) == ("outputs/my-env-2/run.toml", written)
    code, _, err = rl("--yes", "--output-dir", "outputs/my-env")
    assert (code, len(started)) == (2, 2)
    assert err == wording

    write_model(project / "outputs" / "my-env" / "weights" / "step_2")
    plan = json.loads(rl("--dry-run", "--json")[1])
    assert tomllib.loads(plan["text"])["model"]["name"] == "tiny"  # not the file that a run has resolved

    rl("@", "outputs/my-env/run.toml", "--output-dir", "elsewhere")
    assert started[2][0].trainer == started[0][0].trainer.model_copy(update={"output_dir": Path("elsewhere")})


@pytest.mark.parametrize(
    ("words", "project_name"),
    [
        ((), "my-env"),
        (("--no-wandb",), None),
        (("--wandb.project", "other"), "other"),
        (("--trackio.project", "p"), None),
    ],
)
def test_wandb_project_is_named_after_the_environment(rl, project, words, project_name):
    (project / ".env").write_text("WANDB_API_KEY=0123456789\n")
    code, out, err = rl("--dry-run", "--json", *words)
    assert code == 0, err
    plan = json.loads(out)
    assert tomllib.loads(plan["text"]).get("wandb", {}).get("project") == project_name
    assert ("logs to" in plan) == (words == ())


def test_wandb_key_without_its_package_is_a_warning(rl, project, monkeypatch):
    (project / ".env").write_text("WANDB_API_KEY=0123456789\n")
    monkeypatch.setattr("buckeye.cli.composed_run.find_spec", lambda name: None)
    code, out, err = rl("--dry-run", "--json")
    assert (code, "logs to" in json.loads(out)) == (0, False)
    assert "wandb" in err
    assert rl("--no-wandb", "--wandb.project", "p")[0] == 2


def test_failed_start_removes_the_config(rl, project, monkeypatch, wording):
    def fail(*_):
        raise UsageError("no such model")

    before = files(project)
    monkeypatch.setattr(train, "start", fail)
    assert rl("--yes")[2] == wording
    assert (files(project), (project / "outputs" / "my-env").exists()) == (before, False)

    def begin(config, command, on_start):
        on_start()
        return 0

    monkeypatch.setattr(train, "start", begin)
    assert rl("--yes")[2] == wording


@pytest.mark.parametrize("kept", ["", "a", "a/b", "a/b/c"])
def test_failed_start_removes_only_its_new_folders(rl, project, monkeypatch, kept):
    def fail(*_):
        raise UsageError("no such model")

    (project / kept).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(train, "start", fail)
    assert rl("--yes", "--output-dir", "a/b/c")[0] == 2
    left = [path.relative_to(project).as_posix() for path in (project / "a").rglob("*")]
    assert ((project / "a").exists(), left) == (kept != "", ["a/b", "a/b/c"][: kept.count("/")])


@pytest.mark.parametrize("ordered", [False, True])
def test_failed_remote_start_removes_the_config(rl, project, monkeypatch, ordered):
    def fail(file, flags, **_):
        words = dict.fromkeys(("id", "target", "folder", "python", "known_hosts"), "x")
        job = RemoteJob(**words, pod=None, identity_file=None, sent=()) if ordered else None
        write_remote_run(
            file.parent,
            RemoteRun(run_id="ab12cd34", state="over", started=1.0, said=2.0, job=job),
        )
        raise UsageError("not a terminal")

    monkeypatch.setattr("buckeye.cli.composed_run.start_remote", fail)
    assert rl("--gpus", "4xH100", "--provider", "prime", "--yes")[0] == 2
    assert (project / "outputs" / "my-env" / "run.toml").exists() == ordered


def test_same_command_reuses_the_folder_of_a_run_without_steps(rl, project, monkeypatch, wording):
    folder = project / "outputs" / "my-env"
    monkeypatch.setattr(train, "start", lambda *_: begin_attempt(folder, resumed_step=None).attempt)
    assert rl("--yes", "--quiet", "--trainer.optim.lr", "0.5")[0] == 1
    assert rl("--yes", "--quiet", "--output-dir", "outputs/my-env")[0] == 1
    assert rl("--yes", "--quiet")[0] == 1
    kept = list((folder / "earlier_starts").glob("*/run.toml"))
    assert (len(kept), sum("lr = 0.5" in file.read_text() for file in kept)) == (2, 1)
    with lock_directory(folder):  # the run is active
        assert json.loads(rl("--dry-run", "--json")[1])["file"] == "outputs/my-env-2/run.toml"
        assert rl("--yes", "--output-dir", "outputs/my-env")[2] == wording


def test_folder_used_since_the_plan_is_refused(rl, project, monkeypatch):
    def take(*_):
        (project / "outputs" / "my-env").mkdir(parents=True)
        (project / "outputs" / "my-env" / "run.toml").write_text("of another run")

    monkeypatch.setattr("buckeye.cli.composed_run.plan_text", take)
    assert rl("--yes")[0] == 2
    assert (project / "outputs" / "my-env" / "run.toml").read_text() == "of another run"


def test_used_folder_is_refused_with_the_command_to_start_or_resume(rl, project, wording):
    (project / "kept").mkdir()
    (project / "kept" / "run.toml").write_text("max_steps = 1\n")
    assert rl("--output-dir", "kept")[2] == wording
    (project / "kept" / "run.json").write_text("{}")
    assert rl("--output-dir", "kept")[2] == wording


def test_missing_gpus_are_refused_after_the_plan_of_a_dry_run(rl, project, wording):
    (project / "configs" / "2048.yaml").write_text(CONFIG)
    code, _, err = rl("--config", "configs/2048.yaml", "--gpus", "4xH100")
    assert (code, re.sub(r"\d+ cores", "N cores", err)) == (2, wording)
    code, out, err = rl("--config", "configs/2048.yaml", "--gpus", "4xH100", "--dry-run", "--json")
    assert code == 2
    written = tomllib.loads(json.loads(out)["text"])
    assert (written["inference_gpu_ids"], written["trainer_gpu_ids"]) == ([0, 1, 2], [3])
    assert re.sub(r"\d+ cores", "N cores", err) == wording


def test_plan_uses_singular_and_plural(rl):
    sizes = ("--orchestrator.batch-size", "2", "--orchestrator.rollouts-per-example", "2", "--max-steps", "1")
    plan = "\n".join(plan_of(rl(*sizes, "--dry-run")[1]))
    assert "2 rollouts: 1 task with 2 rollouts each" in plan


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (1, "1 time"),
        (1.0, "1 time"),
        (1.0004, "1 time"),
        (0, "0 times"),
        (0.5, "0.5 times"),
        (2000, "2,000 times"),
    ],
)
def test_a_noun_is_in_the_plural_unless_the_number_is_shown_as_1(number, shown):
    assert counted(number, "time") == shown


def test_plan_of_a_rented_machine(rl, wording, monkeypatch):
    monkeypatch.setattr("buckeye.remote.dry_run.obstacles", lambda *given, **named: [])
    code, out, _ = rl("--gpus", "4xH100", "--provider", "prime", "--max-price", "9", "--dry-run")
    assert code == 0
    assert plan_of(out) == wording


@pytest.mark.parametrize(
    "words",
    [
        "--provider prime",
        "--provider ssh",
        "--provider aws",
        "--datset x",
        "--config run.toml",
        "--config none.yaml",
        "--dataset none.json",
        "--model ./none",
        "--max-price free",
        "--gpus 4xH100 @ run.toml",
        "--gpus 2 --provider prime",
        "--max-price 3",
        "--yes --host me@there",
        "--yes --clean",
        "--yes --resume",
        "--output-dir tasks.json/run",
        "--output-dir .",
        "--dataset=",
        "--model",
        "--yes what",
        "statsu",
        "tasks.json",
        "run.toml",
        "--dataset t.json @run.toml",
        "--orchestrator.batch-size 3",
        "--model gpt-4o-mini --dataset my-org/my-tasks",
    ],
)
def test_invalid_flags_are_one_error_with_exit_code_2(rl, project, words, wording):
    before = files(project)
    code, out, err = rl(*words.split())
    assert (code, out) == (2, "")
    assert err == wording
    assert files(project) == before


def test_missing_or_ambiguous_parts_without_terminal_name_the_flag(rl, project, wording):
    (project / "configs" / "other.yaml").write_text(CONFIG)
    assert rl()[2] == wording
    (project / "configs" / "other.yaml").unlink()
    (project / "more_tasks.json").write_text("[]")
    assert rl()[2] == wording
    (project / "more_tasks.json").unlink()
    write_model(project / "models" / "second")
    assert rl()[2] == wording
    (project / "tasks.json").unlink()
    assert rl("--yes")[2] == wording
    shutil.rmtree(project / "configs")
    code, _, err = rl("--yes")
    assert (code, err) == (2, wording)
    assert files(project) == [f"{m}/{f}" for m in ("models/second", "tiny") for f in sorted(SHAPE_FILES)]


SHAPE_FILES = ("config.json", "model.safetensors")


def test_the_dataset_of_the_lock_file_is_taken(rl, planned, project, wording):
    (project / "buckeye.lock.yaml").write_text(
        LOCK + "primary_dataset:\n  name: held.json\n  task_count: 2\n  updated_at: '2024-01-01T00:00:00'\n"
    )
    held = [task(0), task(1, metadata={"split": "eval"})]
    (project / "held.json").write_text(json.dumps(held))
    _, out, _ = rl("--dry-run")
    assert out.splitlines()[2] == wording
    evaluation = planned()["orchestrator"]["eval"]
    assert evaluation == {"interval": 20, "num_examples": 1}  # of the environments of the run


def test_tasks_without_servers_become_a_dataset_on_the_image_of_the_lock_file(
    rl, project, monkeypatch, wording
):
    monkeypatch.setattr(train, "start", lambda *_: 0)
    (project / "buckeye.lock.yaml").write_text(LOCK)
    bare = task(0)
    del bare["mcp_config"]
    (project / "tasks.json").write_text(json.dumps([bare]))
    assert rl("--dry-run")[2] == wording
    code, out, _ = rl("--yes", "--json")
    assert code == 0
    assert json.loads(out)["dataset"] == "my-env-tasks"
    assert (project / "my-env-tasks" / "data" / "train-00000-of-00001.parquet").exists()
    assert "name: my-env-tasks" in (project / "buckeye.lock.yaml").read_text()


def test_tasks_that_cannot_run_are_refused(rl, project, wording):
    (project / "tasks.json").write_text(json.dumps([task(0, evaluate_tool={"name": "go"})]))
    assert rl("--yes")[2] == wording


@pytest.fixture
def remote(monkeypatch):
    """Calls of the remote launcher, as (file, request)."""
    handed = []
    module = types.ModuleType("buckeye.remote.remote_run")
    module.__spec__ = importlib.machinery.ModuleSpec("buckeye.remote.remote_run", None)
    module.run_remote = lambda path, request, **_: handed.append((path, request)) or 0
    monkeypatch.setitem(sys.modules, "buckeye.remote.remote_run", module)
    return handed


def test_tasks_without_grading_are_refused_before_an_order(rl, project, remote):
    (project / "tasks.json").write_text(json.dumps([task(0), task(1, evaluate_tool=[])]))
    for words in (["--dry-run"], ["--gpus", "4xH100", "--provider", "prime", "--yes"]):
        code, _, err = rl(*words)
        assert (code, "t1" in err) == (2, True)
    assert not (project / "outputs").exists()


def test_remote_run_gets_the_file_and_all_flags(rl, project, remote, wording):
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
    assert (request.max_price, request.max_hours, request.host) == (5, 2, ())

    words = ("--provider", "ssh", "--host", "me@there:2222", "--host", "you@here", "--identity-file", "key")
    assert rl("@", str(path), *words, "--yes")[0] == 0
    assert (remote[1][0], remote[1][1].host) == (path, ("me@there:2222", "you@here"))
    code, _, err = rl("@", str(path), *words, "--max-steps", "3")
    assert (code, len(remote)) == (2, 2)
    assert err == wording


@pytest.mark.parametrize(("error", "stays"), [(UsageError, False), (RemoteError, True)])
def test_the_file_of_a_run_that_was_refused_before_an_order_is_removed(
    rl, project, remote, monkeypatch, error, stays
):
    """An error after the order names the file in the command that continues the run."""

    def fail(*_, **__):
        raise error("it cannot be")

    monkeypatch.setattr(sys.modules["buckeye.remote.remote_run"], "run_remote", fail)
    assert rl("--gpus", "1xH100", "--provider", "prime", "--yes")[0] == error.exit_code
    assert (project / "outputs/my-env/run.toml").exists() == stays


def test_local_image_is_refused_for_a_remote_run(rl, project, remote, wording):
    server = {"buckeye": {"url": "http://localhost:8765/mcp", "headers": {"Mcp-Image": "my-env:latest"}}}
    (project / "tasks.json").write_text(json.dumps([task(0, mcp_config=server)]))
    words = ("--gpus", "1xH100", "--provider", "prime")
    assert rl(*words, "--yes")[2] == wording
    server["buckeye"]["headers"]["Mcp-Image"] = "org/my-env:latest"
    (project / "tasks.json").write_text(json.dumps([task(0, mcp_config=server)]))
    (project / "buckeye.lock.yaml").write_text(
        "image: org/my-env:latest\nbuilt_at: '2024-01-02T00:00:00+00:00'\n"
    )
    assert rl(*words)[2] == wording
    assert (remote, (project / "outputs").exists()) == ([], False)
    with (project / "buckeye.lock.yaml").open("a") as lock:
        lock.write("pushed_at: '2024-01-03T00:00:00+00:00'\n")
    assert (rl(*words)[0], len(remote)) == (0, 1)


def test_local_gpus_keep_their_device_ids(rl, project, tmp_path, monkeypatch, wording):
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
    for gpus in ("4xH100", "1xA100"):
        code, _, err = rl("--gpus", gpus)
        assert code == 2
        assert re.sub(r"\d+ cores", "N cores", err) == wording


def test_no_eval_is_shown_in_the_plan(rl, project, wording):
    held_out = [task(i, metadata={"split": "eval"}) for i in (4, 5)]
    (project / "tasks.json").write_text(json.dumps([*(task(i) for i in range(4)), *held_out]))
    with_it = json.loads(rl("--dry-run", "--json")[1])
    without = json.loads(rl("--dry-run", "--json", "--no-eval")[1])
    assert "[orchestrator.eval]" in with_it["text"]
    assert "[orchestrator.eval" not in without["text"]
    assert without["tasks"] == wording


def test_plan_of_a_run_without_max_steps(rl, wording):
    assert json.loads(rl("--dry-run", "--json", "--max-steps", "None")[1])["steps"] == wording


@pytest.mark.parametrize("flag", ["--orchestrator.eval.interval=4", "--orchestrator.eval"])
def test_flags_that_contradict_each_other_are_refused(flag, refusal):
    with refusal(UsageError):
        parse_train_args(("--no-eval", flag)).check_composed()


def test_flags_of_a_composed_run_are_refused_with_a_file(refusal):
    with refusal(UsageError):
        parse_train_args(["@", "run.toml", "--no-eval"]).plain_settings()
    assert (
        parse_train_args(["--provider", "ssh", "--host", "me@there", "--max-hours", "2"]).flags.max_hours == 2
    )


def test_empty_folder_reports_missing_parts_in_order_and_stays_empty(rl, project, monkeypatch, wording):
    shutil.rmtree(project)
    project.mkdir()
    monkeypatch.chdir(project)
    ends = {rl(*more) for more in ((), ("--yes",), ("--json",), ("--dry-run",), ("--quiet",))}
    ((code, out, err),) = ends
    assert (code, out) == (2, "")
    assert err == wording
    assert list(project.iterdir()) == []
    fill(project)
    (project / "tasks.json").unlink()
    assert rl()[2] == wording


def test_damaged_model_is_refused(rl, project, wording):
    weights, description = project / "tiny" / "model.safetensors", project / "tiny" / "config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:20])
    assert rl("--dry-run", "--model", "tiny")[2] == wording
    weights.write_bytes(whole)
    description.write_text(description.read_text()[:9])
    assert rl("--dry-run", "--model", "tiny")[2] == wording


@pytest.mark.slow
def test_it_trains_with_one_command(tmp_path):
    source = ROOT / "environments" / "text_2048"
    (tmp_path / "configs").mkdir()
    text = (source / "text_2048.yaml").read_text().replace("max_turns: 100", "max_turns: 2")
    (tmp_path / "configs" / "2048.yaml").write_text(text)
    shutil.copy(source / "tasks.json", tmp_path)
    tiny = ("model", "tiny", "tiny", "--corpus", "tasks.json", "--layers", "1", "--hidden", "64")
    for words in (tiny, ("rl", "--yes", "--max-steps", "2")):
        subprocess.run([sys.executable, "-m", "buckeye", *words], cwd=tmp_path, check=True)
    assert (tmp_path / "outputs" / "2048" / "weights" / "step_2" / "model.safetensors").exists()
    assert (tmp_path / "outputs" / "2048" / "evals" / "step_2").is_dir()
