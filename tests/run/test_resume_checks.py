"""Settings that do not fit a checkpoint are refused before a start, and leave the run unchanged."""

import json
import shutil

import numpy as np
import pytest

from buckeye.base.process import RunIdentity
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.envs.registry import CALLER
from buckeye.errors import UsageError
from buckeye.launch.resume import find_run_origin, resume_hint
from buckeye.runs.stop import continuation
from buckeye.trainer.rl import run_trainer
from buckeye.transport.batches import Batch, Sample, write_batch
from tests.trainer.trainer_config import trainer_config

from .made_runs import made_run

LORA = "--trainer.model.experimental.lora"


def kept(run):
    """Return the files that record how a run is resumed and whether it was restarted."""
    names = ("status.json", "configs/rl.json", "configs/trainer.json", "run.json", "events.jsonl")
    return {name: (run / name).read_bytes() for name in names if (run / name).exists()}


def trained_once(run, model, lora=None):
    """Make a run's directory with the checkpoint that a real trainer commits after a step."""
    made_run(run)
    sample = Sample(
        token_ids=np.arange(20, dtype=np.int32),
        loss_mask=np.arange(20) > 5,
        logprobs=np.full(20, -5.5, np.float32),
        versions=np.zeros(20, np.int32),
        advantages=np.ones(20, np.float32),
        temperature=1.0,
    )
    batch = Batch(step=0, samples=(sample, sample), orchestrator_state={})
    write_batch(run / "batches", batch, identity=RunIdentity(run_id="local", attempt=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUCKEYE_THREADS", "1")
        run_trainer(trainer_config(model, run, max_steps=1, model={"experimental": {"lora": lora}}))
    return run


@pytest.fixture(scope="module")
def model_run(tmp_path_factory, tiny_model):
    return trained_once(tmp_path_factory.mktemp("model") / "out", tiny_model)


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory, tiny_model):
    lora = {"rank": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["norm"]}
    return trained_once(tmp_path_factory.mktemp("adapter") / "out", tiny_model, lora)


AS_IT_WAS = [f"{LORA}.rank", 4, f"{LORA}.target-modules", "q_proj,v_proj", f"{LORA}.modules-to-save", "norm"]


@pytest.mark.parametrize(
    ("checkpoint", "words", "reason"),
    [
        ("model", [], None),
        (
            "model",
            ["--trainer.optim.type", "sgd"],
            "trainer.optim.type = sgd: the checkpoint has the state of adamw",
        ),
        ("model", [LORA], "lora: the checkpoint has a complete model and no adapter"),
        ("adapter", AS_IT_WAS, None),
        ("adapter", [], "lora: not set, but the checkpoint has an adapter"),
        (
            "adapter",
            [*AS_IT_WAS, "--trainer.optim.type", "muon"],
            "muon: the checkpoint has the state of adamw",
        ),
        ("adapter", [*AS_IT_WAS, f"{LORA}.rank", 8], "lora.rank = 8: the checkpoint has 4"),
        ("adapter", [*AS_IT_WAS, f"{LORA}.alpha", 3], "lora.alpha = 3.0: the checkpoint has 16.0"),
    ],
    ids=range(8),
)
def test_resume_refuses_incompatible_settings(runner, model_run, adapter_run, checkpoint, words, reason):
    made = {"model": model_run, "adapter": adapter_run}[checkpoint]
    run = shutil.copytree(made, runner.root / "out")
    before = kept(run)
    command = runner.rl("out", *words, "--resume", "--dry-run")
    dry = runner.here(command)
    assert dry.returncode == (0 if reason is None else 2), dry.stderr
    if reason is None:
        assert "checkpoint" not in dry.stderr
        return
    assert reason in dry.stderr
    done = runner.here(command[:-1])
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr
    assert kept(run) == before


def test_resume_refuses_fewer_steps_than_done(tmp_path, monkeypatch, refusal):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = made_run(tmp_path / "run", checkpoints=(4, 6))
    words = ["--trainer", "--orchestrator", "--output-dir", str(run), "--max-steps", "5"]
    with refusal(UsageError):
        find_run_origin(load_config(RLConfig, [*words, "--resume"]))
    assert find_run_origin(load_config(RLConfig, [*words, "--ckpt.resume-step", "4"])).step == 4


def test_sft_resume_refuses_fewer_steps_than_done(runner, tiny_model):
    """The refusal comes before any write, so the recorded configuration stays unchanged."""
    chat = {"messages": [{"role": "user", "content": "say 1"}, {"role": "assistant", "content": "2"}]}
    (runner.root / "chats.jsonl").write_text("\n".join([json.dumps(chat)] * 4))
    words = ["sft", "--model.name", tiny_model, "--data.path", "chats.jsonl", "--batch-size", 4]
    words = runner.argv(*words, "--seq-len", 64, "--output-dir", "tuned", "--model.device", "cpu")
    assert runner.here([*words, "--max-steps", "1"]).returncode == 0
    kept_so = (runner.root / "tuned" / "configs" / "sft.json").read_bytes()
    again = [*words, "--max-steps", "2", "--ckpt.resume-step", "-1", "--optim.type", "sgd"]
    refused = runner.here(again)
    assert refused.returncode == 2
    assert "optim.type = sgd: the checkpoint has the state of adamw" in refused.stderr
    assert (runner.root / "tuned" / "configs" / "sft.json").read_bytes() == kept_so


@pytest.mark.e2e
@pytest.mark.slow
def test_settings_that_a_process_refuses_are_not_recorded(runner):
    """The custom loss fails on import, which only the trainer does."""
    assert runner.run(runner.rl("out", steps=2, level=0)).returncode == 0
    run = runner.root / "out"
    (runner.root / "bad.py").write_text("def f(inputs): ...\nraise ValueError('not today')\n")
    words = ["--max-steps", 4, "--trainer.loss.type", "custom", "--trainer.loss.import-path", "bad.py:f"]
    before = kept(run)
    refused = runner.run(runner.argv("rl", "resume", "out", *words))
    assert refused.returncode != 0
    assert "not today" in refused.stderr + refused.stdout
    assert (run / "configs/rl.json").read_bytes() == before["configs/rl.json"]
    runner.ok(runner.argv("rl", "resume", "out", "--max-steps", 4))
    assert json.loads((run / "configs" / "rl.json").read_text())["max_steps"] == 4
    assert "--max-steps" in continuation(run, ["--max-steps", "6"]).arguments


@pytest.mark.parametrize(
    ("env", "expected"),
    [("letters", "rl @ run.toml --resume"), (CALLER, "buckeye.open_run('out').resume(")],
)
def test_hint_of_a_stopped_run_names_python_for_an_object_of_python(env, expected):
    config = load_config(RLConfig, ["--orchestrator.env.0.id", env, "--output-dir", "out"])
    assert resume_hint(config, ["rl", "@", "run.toml"]).startswith(expected)
