"""Supervised fine-tuning reduces the loss, resumes exactly, and writes a complete model."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from itertools import combinations

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM, AutoTokenizer

from buckeye.config.load import to_json
from buckeye.errors import CheckpointError, UsageError
from buckeye.monitor.metrics import read_metrics
from buckeye.trainer.model.policy import PolicyNetwork
from buckeye.trainer.sft import SFTTrainer, run_sft
from buckeye.transport.checkpoint import list_checkpoints, read_orchestrator_state, resolve_checkpoint
from tests.command import run_here
from tests.trainer.trainer_config import sft_config


@pytest.fixture(scope="module")
def chat_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    pairs = [("one", "waŋži"), ("two", "nuŋpa"), ("three", "yamni"), ("four", "topa"), ("five", "zaptaŋ")]
    lines = [
        json.dumps({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]})
        for q, a in pairs
    ]
    path.write_text("\n".join(lines))
    return path


def sft(model, output_dir, chat_file, **changes):
    data = {"path": str(chat_file), "val_path": None, "seed": 0}
    data |= changes.pop("data", {})
    run_sft(sft_config(model, output_dir, batch_size=3, data=data, **changes))


def records(output_dir, process="sft"):
    return [r for r in read_metrics(output_dir / "metrics.jsonl") if r["process"] == process]


def test_sft_reduces_the_loss_and_writes_a_model(tmp_path, tiny_model, chat_file, capsys):
    data = {"val_path": str(chat_file)}
    sft(tiny_model, tmp_path, chat_file, max_steps=40, data=data, ckpt={"interval": 20})
    logged = records(tmp_path)
    assert [r["step"] for r in logged] == list(range(40))
    assert logged[0]["loss"] > 4
    measured = {r["step"]: r["val_loss"] for r in records(tmp_path, "validation")}
    assert list(measured) == [0, 20, 40]
    assert measured[0] > 4
    assert measured[40] < 0.5
    assert [info.step for info in list_checkpoints(tmp_path / "checkpoints")] == [20, 40]
    assert "SUCCESS Step 39 | Time: " in capsys.readouterr().out

    directory = tmp_path / "weights" / "step_40"
    model, tokenizer = (kind.from_pretrained(directory) for kind in (AutoModelForCausalLM, AutoTokenizer))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "two"}], add_generation_prompt=True, return_tensors="pt"
    )
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]).startswith("nuŋpa<|im_end|>")


def test_resume_is_bit_exact(tmp_path, tiny_model, chat_file):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    schedule = {"type": "linear", "warmup": 1, "decay": 2}
    sft(tiny_model, straight, chat_file, max_steps=4, scheduler=schedule)
    stopper = threading.Thread(target=_stop_when, args=(broken / "checkpoints" / "step_2",))
    stopper.start()
    sft(tiny_model, broken, chat_file, max_steps=4, scheduler=schedule, ckpt={"interval": 1})
    stopper.join()
    reached = max(info.step for info in list_checkpoints(broken / "checkpoints"))
    resume = {"interval": 1, "resume_step": 2}
    sft(tiny_model, broken, chat_file, max_steps=4, scheduler=schedule, ckpt=resume)
    assert reached >= 2
    one, other = (load_file(run / "weights/step_4/model.safetensors") for run in (straight, broken))
    assert all(torch.equal(one[name], other[name]) for name in one)
    tail = [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in records(broken)][-2:]
    assert tail == [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in records(straight)][2:]


def test_resume_with_other_data_is_refused(tmp_path, tiny_model, chat_file):
    data = tmp_path / "data.jsonl"
    data.write_text(chat_file.read_text())
    sft(tiny_model, tmp_path, data, max_steps=1)
    data.write_text(chat_file.read_text().replace("topa", "tópa"))
    with pytest.raises(CheckpointError, match=r"sha256 is \w+, recorded \w+") as raised:
        sft(tiny_model, tmp_path, data, max_steps=2, ckpt={"resume_step": -1})
    assert raised.value.code == "BK-CHECKPOINT-MISMATCH"
    with pytest.raises(CheckpointError, match="seed is 1, recorded 0"):
        sft(tiny_model, tmp_path, data, max_steps=2, ckpt={"resume_step": -1}, data={"seed": 1})
    anew = {"resume_step": -1, "skip_dataloader": True}
    sft(tiny_model, tmp_path, data, max_steps=2, ckpt=anew)
    assert [(r["step"], r["epoch"]) for r in records(tmp_path)] == [(0, 0.0), (1, 0.0)]
    data.write_text("\n".join(chat_file.read_text().splitlines()[:4]))
    with pytest.raises(CheckpointError, match="conversations is 4, recorded 5"):
        sft(tiny_model, tmp_path, data, max_steps=3, ckpt={"resume_step": -1})


def _stop_when(path):
    while not path.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)


def test_without_max_steps_it_is_one_epoch(tmp_path, tiny_model, chat_file):
    sft(tiny_model, tmp_path, chat_file)
    assert len(records(tmp_path)) == 2  # five conversations, three at a time


def test_the_loss_is_per_assistant_token(tmp_path, tiny_model, chat_file):
    sft(tiny_model, tmp_path, chat_file, max_steps=1, seq_len=40)
    first = records(tmp_path)[0]
    assert first["samples"] == 3
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    losses = {}
    for line in chat_file.read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        answer = messages[1]["content"] + "<|im_end|>"
        ids = tokenizer.encode(prompt) + tokenizer.encode(answer)
        start = len(tokenizer.encode(prompt))
        with torch.no_grad():
            log_p = model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
        losses[answer] = -log_p.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
    means = [torch.cat(chosen).mean().item() for chosen in combinations(losses.values(), 3)]
    assert min(abs(first["loss"] - mean) for mean in means) < 1e-4


def test_packed_conversations_train_like_separate_ones(tmp_path, tiny_model, chat_file):
    """Each has 26 to 34 tokens; the first six are the same in all."""
    passes = {}
    for tokens in (1, 64, 2048):
        with counted_rows() as rows:
            changes = {"micro_batch_tokens": tokens, "data": {"val_path": str(chat_file)}}
            # other optimizers turn rounding differences into steps
            changes["optim"] = {"type": "sgd", "lr": 0.3}
            sft(tiny_model, tmp_path / str(tokens), chat_file, max_steps=4, seq_len=40, **changes)
        passes[tokens] = len(rows)
    # two validations of five conversations, and steps of three, two, three and two
    assert passes == {1: 2 * 5 + 10, 64: 2 * 3 + 2 + 1 + 2 + 1, 2048: 2 + 4}
    alone = tmp_path / "1"
    for packed in (tmp_path / "64", tmp_path / "2048"):
        for process, names in (("sft", ("loss", "entropy", "grad_norm")), ("validation", ("val_loss",))):
            for one, other in zip(records(alone, process), records(packed, process), strict=True):
                assert one["trained_tokens"] == other["trained_tokens"]
                assert [one[name] for name in names] == pytest.approx([other[n] for n in names], rel=1e-4)
        one, other = (load_file(run / "weights/step_4/model.safetensors") for run in (alone, packed))
        assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


@contextmanager
def counted_rows():
    """Yield the lengths in tokens of all rows that a policy computes."""
    rows = []

    def count(module, arguments):
        if isinstance(module, PolicyNetwork):
            rows.append(len(arguments[0].token_ids))

    hook = register_module_forward_pre_hook(count)
    try:
        yield rows
    finally:
        hook.remove()


def test_too_long_samples_are_left_out(tmp_path, tiny_model, chat_file, refusal):
    long = json.dumps(
        {"messages": [{"role": "user", "content": "x" * 500}, {"role": "assistant", "content": "y"}]}
    )
    path = tmp_path / "long.jsonl"
    path.write_text(chat_file.read_text() + "\n" + long)
    sft(tiny_model, tmp_path, path)
    assert [r["samples"] for r in records(tmp_path)] == [3, 3]
    path.write_text(long)
    with refusal(UsageError):
        sft(tiny_model, tmp_path / "none", path)


def test_best_checkpoint_is_recorded_and_kept(tmp_path, tiny_model, chat_file):
    """The learning rate destroys the model, so the first checkpoint remains the best."""
    other = tmp_path / "val.jsonl"
    other.write_text(chat_file.read_text().splitlines()[0])
    wild = {"data": {"val_path": str(other), "val_interval": 1}, "optim": {"type": "sgd", "lr": 30.0}}
    sft(tiny_model, tmp_path, chat_file, max_steps=6, ckpt={"interval": 2, "keep": 1}, **wild)
    measured = {r["step"]: r["val_loss"] for r in records(tmp_path, "validation")}
    assert list(measured) == [0, 1, 2, 3, 4, 5, 6]
    best = min((2, 4, 6), key=measured.__getitem__)
    assert best < 6, measured
    assert [info.step for info in list_checkpoints(tmp_path / "checkpoints")] == [best, 6]
    resume = {"interval": 2, "keep": 1, "resume_step": 6}
    sft(tiny_model, tmp_path, chat_file, max_steps=8, ckpt=resume, **wild)
    assert f"Best: {measured[best]:.4f} at step {best}" in (tmp_path / "logs" / "run.log").read_text()
    measured |= {r["step"]: r["val_loss"] for r in records(tmp_path, "validation")}
    kept = {8, min((2, 4, 6, 8), key=measured.__getitem__)}
    assert {info.step for info in list_checkpoints(tmp_path / "checkpoints")} == kept


def test_loss_that_is_not_finite_is_not_the_best(tmp_path, tiny_model, chat_file, monkeypatch):
    run_samples = SFTTrainer._run_samples

    def run(self, samples, *, train):
        sums = run_samples(self, samples, train=train)
        return sums if train or self.step != 1 else sums | {"loss": math.nan}

    monkeypatch.setattr(SFTTrainer, "_run_samples", run)
    sft(tiny_model, tmp_path, chat_file, max_steps=2, ckpt={"interval": 1}, data={"val_path": str(chat_file)})
    assert read_orchestrator_state(resolve_checkpoint(tmp_path / "checkpoints", 2))["best"]["step"] == 2


@pytest.mark.e2e
@pytest.mark.smoke
def test_killed_at_any_moment_and_resumed_is_bit_exact(tmp_path, tiny_model, chat_file):
    """The command is killed by SIGKILL in the middle of a step."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    settings = {"max_steps": 8, "data": {"val_path": str(chat_file)}}
    data = {"path": str(chat_file), "seed": 0, **settings["data"]}
    config = sft_config(
        tiny_model, broken, **{**settings, "batch_size": 3, "data": data, "ckpt": {"interval": 2}}
    )
    (tmp_path / "sft.json").write_text(to_json(config))
    command = [sys.executable, "-m", "buckeye", "sft", "@", str(tmp_path / "sft.json")]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not (broken / "checkpoints" / "step_4").exists():
        assert killed.poll() is None
        time.sleep(0.001)
    killed.kill()
    killed.wait()
    sft(tiny_model, straight, chat_file, ckpt={"interval": 2}, **settings)
    sft(tiny_model, broken, chat_file, ckpt={"interval": 2, "resume_step": -1}, **settings)
    one, other = (load_file(run / "weights/step_8/model.safetensors") for run in (straight, broken))
    assert all(torch.equal(one[name], other[name]) for name in one)

    def curve(run):
        losses = {(r["process"], r["step"]): r.get("loss", r.get("val_loss")) for r in read_metrics(run)}
        # the loss of a checkpoint is written after its commit, when the process may be dead
        return {key: loss for key, loss in losses.items() if key[0] != "checkpoint"}

    assert curve(broken / "metrics.jsonl") == curve(straight / "metrics.jsonl")


@pytest.mark.parametrize("flag", ["data.path", "data.val-path"])
@pytest.mark.parametrize("name", ["chat.jsonl", "prompts.jsonl"])
def test_wrong_data_is_refused_before_torch_is_imported(
    tmp_path, tiny_model, chat_file, monkeypatch, flag, name
):
    shutil.copy(chat_file, tmp_path / "chats.jsonl")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "What is 1 plus 1?"}\n')
    monkeypatch.setitem(sys.modules, "buckeye.trainer.sft", None)  # an import of it raises ImportError
    flags = {"data.path": "chats.jsonl", flag: name}
    words = [part for key, value in flags.items() for part in (f"--{key}", value)]
    done = run_here("sft", "--model", tiny_model, *words, "--output-dir", "out", cwd=tmp_path)
    assert done.returncode == 2
    if name == "chat.jsonl":
        assert "BK-FILE-NOT-FOUND" in done.stderr
        assert f"at {flag.replace('-', '_')}" in done.stderr
        assert "Did you mean `chats.jsonl`?" in done.stderr
    else:
        assert "BK-DATA-FORMAT" in done.stderr
        assert "at prompts.jsonl:1" in done.stderr
    assert not (tmp_path / "out").exists()


def test_seq_len_beyond_rotary_positions_is_refused(tmp_path, tiny_model, chat_file):
    config = json.loads((tiny_model / "config.json").read_text())
    shutil.copytree(tiny_model, tmp_path / "model")
    rope = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 100}
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, **rope}))
    words = ("--model", "model", "--data.path", chat_file, "--output-dir", "out", "--seq-len")
    done = run_here("sft", *words, "101", cwd=tmp_path)
    assert done.returncode == 2
    assert "BK-MODEL-UNSUPPORTED" in done.stderr
    assert "seq_len is 101" in done.stderr
