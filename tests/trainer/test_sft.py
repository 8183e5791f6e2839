"""Supervised fine-tuning learns, resumes exactly, and leaves a complete model."""

from __future__ import annotations

import json
import os
import re
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

from buckeye.errors import CheckpointError, UsageError
from buckeye.monitor.metrics import read_metrics
from buckeye.trainer.model.policy import PolicyModule
from buckeye.trainer.sft import run_sft
from buckeye.transport.checkpoint import list_checkpoints
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


def test_it_learns_and_leaves_a_model(tmp_path, tiny_model, chat_file, capsys):
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
    line = capsys.readouterr().out
    assert "SUCCESS Step 39 | Time: " in line
    assert "SUCCESS SFT trainer finished!" in line

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


def test_other_data_is_noticed_on_resume(tmp_path, tiny_model, chat_file):
    data = tmp_path / "data.jsonl"
    data.write_text(chat_file.read_text())
    sft(tiny_model, tmp_path, data, max_steps=1)
    data.write_text(chat_file.read_text().replace("topa", "tópa"))
    changed = r"sha256: \w+, now \w+\).*place in the data.*skip_dataloader"
    with pytest.raises(CheckpointError, match=changed):
        sft(tiny_model, tmp_path, data, max_steps=2, ckpt={"resume_step": -1})
    with pytest.raises(CheckpointError, match="; seed: 0, now 1"):
        sft(tiny_model, tmp_path, data, max_steps=2, ckpt={"resume_step": -1}, data={"seed": 1})
    anew = {"resume_step": -1, "skip_dataloader": True}
    sft(tiny_model, tmp_path, data, max_steps=2, ckpt=anew)
    assert [(r["step"], r["epoch"]) for r in records(tmp_path)] == [(0, 0.0), (1, 0.0)]
    data.write_text("\n".join(chat_file.read_text().splitlines()[:4]))
    with pytest.raises(CheckpointError, match=r"conversations: 5, now 4\)"):
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


def test_short_conversations_share_a_pass_and_learn_what_each_alone_would(tmp_path, tiny_model, chat_file):
    """Of 26 to 34 tokens each, of which the first six are the same."""
    passes = {}
    for tokens in (1, 64, 2048):
        with counted_rows() as rows:
            changes = {"micro_batch_tokens": tokens, "data": {"val_path": str(chat_file)}}
            changes["optim"] = {"type": "sgd", "lr": 0.3}  # others make steps of what is only rounding
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
    """The number of tokens of every row that a policy computes."""
    rows = []

    def count(module, arguments):
        if isinstance(module, PolicyModule):
            rows.append(len(arguments[0].token_ids))

    hook = register_module_forward_pre_hook(count)
    try:
        yield rows
    finally:
        hook.remove()


def test_long_samples_are_left_out_and_said(tmp_path, tiny_model, chat_file):
    long = json.dumps(
        {"messages": [{"role": "user", "content": "x" * 500}, {"role": "assistant", "content": "y"}]}
    )
    path = tmp_path / "long.jsonl"
    path.write_text(chat_file.read_text() + "\n" + long)
    sft(tiny_model, tmp_path, path)
    log = (tmp_path / "logs" / "run.log").read_text()
    assert re.search(r"5 conversations, 5 samples, \d+ tokens, \d+ of them trained; left out: 1 longer", log)
    assert [r["samples"] for r in records(tmp_path)] == [3, 3]
    path.write_text(long)
    with pytest.raises(UsageError, match="longer than seq_len"):
        sft(tiny_model, tmp_path / "none", path)


def test_the_best_checkpoint_is_known_and_kept(tmp_path, tiny_model, chat_file):
    """With a learning rate that destroys the model, the first checkpoint remains the best."""
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


@pytest.mark.slow
def test_two_ranks_that_share_the_model_learn_the_same_as_one(tmp_path, tiny_model, chat_file):
    """With fewer bins than ranks in the last step of an epoch, and in a validation of one conversation."""
    single, four = tmp_path / "val.jsonl", tmp_path / "four.jsonl"
    four.write_text("\n".join(chat_file.read_text().splitlines()[:4]))
    single.write_text(chat_file.read_text().splitlines()[0])
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    argv += [
        "-m",
        "buckeye",
        "sft",
        "--model.name",
        tiny_model,
        "--model.device",
        "cpu",
        "--model.sharding",
        "full",
    ]
    argv += ["--data.path", four, "--data.val-path", single, "--output-dir", tmp_path / "two"]
    argv += ["--max-steps", 4, "--batch-size", 3, "--seq-len", 40, "--optim.lr", 0.01, "--ckpt.interval", 2]
    argv += ["--micro-batch-tokens", 40]
    done = subprocess.run([str(w) for w in argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sft(
        tiny_model,
        tmp_path / "one",
        four,
        seq_len=40,
        micro_batch_tokens=40,  # of the ranks too: one conversation in a row, so that rounding is the same
        data={"val_path": str(single)},
        max_steps=4,
        ckpt={"interval": 2},
    )
    for process, name in (("sft", "loss"), ("sft", "grad_norm"), ("validation", "val_loss")):
        one, two = ([r[name] for r in records(tmp_path / run, process)] for run in ("one", "two"))
        assert two == pytest.approx(one, rel=1e-4), name
    one, two = (load_file(tmp_path / r / "weights/step_4/model.safetensors") for r in ("one", "two"))
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_is_bit_exact(tmp_path, tiny_model, chat_file):
    """As a command, ended by SIGKILL in the middle of a step."""

    def command(output_dir, *words):
        argv = [sys.executable, "-m", "buckeye", "sft", "--model.name", tiny_model, "--model.device", "cpu"]
        argv += ["--data.path", chat_file, "--data.val-path", chat_file, "--output-dir", output_dir]
        argv += ["--max-steps", 12, "--batch-size", 3, "--seq-len", 64, "--ckpt.interval", 2, *words]
        return subprocess.Popen(
            [str(word) for word in argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    straight, broken = tmp_path / "straight", tmp_path / "broken"
    killed = command(broken)
    while not (broken / "checkpoints" / "step_4").exists():
        assert killed.poll() is None, killed.stdout.read()
        time.sleep(0.001)
    killed.kill()
    killed.wait()
    killed.stdout.close()
    for run in (command(straight), command(broken, "--ckpt.resume-step", -1)):
        printed, _ = run.communicate()
        assert run.returncode == 0, printed
    one, other = (load_file(run / "weights/step_12/model.safetensors") for run in (straight, broken))
    assert all(torch.equal(one[name], other[name]) for name in one)

    def curve(run):
        losses = {(r["process"], r["step"]): r.get("loss", r.get("val_loss")) for r in read_metrics(run)}
        # that of a checkpoint is written after its commit, when the process may be dead
        return {key: loss for key, loss in losses.items() if key[0] != "checkpoint"}

    assert curve(broken / "metrics.jsonl") == curve(straight / "metrics.jsonl")


@pytest.mark.slow
def test_batches_of_ever_other_lengths_do_not_fill_the_memory(tmp_path, tiny_model):
    """oneDNN keeps what it has prepared for the shape of every product, torch's caches of it are large."""
    chats = [
        [{"role": "user", "content": "a" * (7 * n % 97)}, {"role": "assistant", "content": "b" * (1 + 3 * n)}]
        for n in range(160)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in chats))
    argv = [sys.executable, "-m", "buckeye", "sft", "--model.name", tiny_model, "--model.device", "cpu"]
    argv += [
        "--model.compute-dtype",
        "bfloat16",
        "--data.path",
        path,
        "--batch-size",
        "4",
        "--seq-len",
        "2048",
    ]
    argv += ["--max-steps", "120", "--output-dir", tmp_path / "out"]
    subprocess.run([str(word) for word in argv], check=True, stdout=subprocess.DEVNULL)
    peaks = [record["peak_memory_gib"] for record in records(tmp_path / "out")]
    assert peaks[-1] - peaks[20] < 0.12
