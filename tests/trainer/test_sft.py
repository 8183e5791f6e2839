"""Supervised fine-tuning learns, resumes exactly, and leaves a complete model."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from itertools import combinations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from buckeye.checkpoint import list_checkpoints
from buckeye.errors import UsageError
from buckeye.monitor.metrics import read_metrics
from buckeye.trainer.sft import run_sft
from tests.trainer.trainer_config import sft_config


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("BUCKEYE_THREADS", "1")
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


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


def records(output_dir):
    return [r for r in read_metrics(output_dir / "metrics.jsonl") if r["process"] == "sft"]


def test_it_learns_and_leaves_a_model(tmp_path, tiny_model, chat_file, capsys):
    data = {"val_path": str(chat_file)}
    sft(tiny_model, tmp_path, chat_file, max_steps=40, data=data, ckpt={"interval": 20})
    logged = records(tmp_path)
    assert [r["step"] for r in logged] == list(range(40))
    assert logged[0]["loss"] > 4
    assert [r["step"] for r in logged if "val_loss" in r] == [19, 39]
    assert logged[39]["val_loss"] < 0.5
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


def test_long_samples_are_left_out_and_said(tmp_path, tiny_model, chat_file):
    long = json.dumps(
        {"messages": [{"role": "user", "content": "x" * 500}, {"role": "assistant", "content": "y"}]}
    )
    path = tmp_path / "long.jsonl"
    path.write_text(chat_file.read_text() + "\n" + long)
    sft(tiny_model, tmp_path, path)
    assert "1 of 3 samples are longer than seq_len = 64" in (tmp_path / "logs" / "run.log").read_text()
    assert sum(r["samples"] for r in records(tmp_path)) == 5
    path.write_text(long)
    with pytest.raises(UsageError, match="longer than seq_len"):
        sft(tiny_model, tmp_path / "none", path)
