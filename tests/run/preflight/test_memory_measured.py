"""The memory plan against what a real trainer and a real engine take at most."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from buckeye.config.load import load_with_warnings
from buckeye.config.rl import RLConfig
from buckeye.process import RunIdentity
from buckeye.run.preflight.devices import main_memory
from buckeye.run.preflight.memory import Hardware, plan_memory, processor_has_bfloat16
from buckeye.run.preflight.shape import read_shape
from buckeye.trainer.tiny import TinySize, make_tiny_model
from buckeye.transport.batches import Batch, Sample, end_batches, write_batch
from tests.ports import free_port

pytestmark = pytest.mark.slow

FACTOR = 1.5
STEPS = 2
ENV = {**os.environ, "BUCKEYE_THREADS": "2", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """63 million parameters: enough to outweigh the interpreter."""
    directory = tmp_path_factory.mktemp("models") / "medium"
    words = [f"{a}{b}{c}" for a in "bcdfghjklmn" for b in "aeiou" for c in "pqrstvwxyz"]
    texts = [" ".join(words[i::7]) for i in range(7)] + [f"{i * i} {i**3}" for i in range(20000)]
    make_tiny_model(directory, texts=texts, size=TinySize(vocab_size=8192, layers=8, hidden=768), seed=0)
    return directory


def _plan(model: Path, *words: str) -> dict[str, int]:
    config, _ = load_with_warnings(
        RLConfig,
        [
            "--model.name",
            str(model),
            "--inference",
            "{}",
            "--max-async-level",
            "0",
            "--trainer.seed",
            "1",
            *words,
        ],
    )
    shape = read_shape(model)
    assert shape is not None
    hardware = Hardware(memory=main_memory(), fast_bfloat16=processor_has_bfloat16())
    return {need.process: need.total for need in plan_memory(config, shape, hardware)}


def _peak(process: subprocess.Popen) -> int:
    """Bytes that a process which is about to end held at most."""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_maxrss * 1024


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (512, ()),
        (4096, ()),
        (2048, ("--trainer.model.ac",)),
        (1024, ("--trainer.model.compute-dtype", "float32", "--trainer.optim.type", "sgd")),
        (1024, ("--trainer.model.experimental.lora",)),
    ],
    ids=["short rows", "long rows", "recomputed", "float32 and SGD", "LoRA"],
)
def test_a_trainer(tmp_path, model, row, words):
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(2 * row // 128):
        mask = np.arange(128) >= 32
        samples.append(
            Sample(
                token_ids=rng.integers(0, 8000, 128).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -9.0, 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.full(128, rng.normal(), np.float32),
                temperature=1.0,
            )
        )
    me = RunIdentity(run_id="local", attempt=1)
    for step in range(STEPS):
        batch = Batch(step=step, samples=tuple(samples), orchestrator_state={})
        write_batch(tmp_path / "batches", batch, identity=me)
    end_batches(tmp_path / "batches", STEPS, identity=me)
    flags = [word.replace("--trainer.", "--") for word in words]
    argv = ["trainer", "--model.name", str(model), "--model.device", "cpu", "--output-dir", str(tmp_path)]
    argv += ["--seq-len", str(row), "--ckpt.interval", "1", "--max-async-level", "4", *flags]
    with (tmp_path / "stdout").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "buckeye", *argv], env=ENV, stdout=out, stderr=subprocess.STDOUT
        )
    peak = _peak(process)
    assert process.returncode == 0, (tmp_path / "stdout").read_text()[-3000:]
    planned = _plan(model, "--trainer.seq-len", str(row), "--orchestrator.seq-len", "128", *words)[
        "trainer 0"
    ]
    print(f"trainer {row} {words}: planned {planned / 1e9:.2f} GB, measured {peak / 1e9:.2f} GB")
    assert planned / FACTOR < peak < planned * FACTOR


@pytest.mark.parametrize("length", [256, 1024])
def test_an_engine(tmp_path, model, length):
    port = free_port()
    argv = ["inference", "--model.name", str(model), "--model.device", "cpu", "--server.port", str(port)]
    argv += ["--model.max-model-len", str(length), "--output-dir", str(tmp_path)]
    with (tmp_path / "stdout").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "buckeye", *argv], env=ENV, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url)
        body = {"prompt": [[7 * i + j for j in range(length - 50)] for i in range(32)], "max_tokens": 40}
        httpx.post(
            f"{url}/v1/completions", json={"model": str(model), **body}, timeout=300
        ).raise_for_status()
    finally:
        process.terminate()
    peak = _peak(process)
    words = ("--orchestrator.seq-len", str(length), "--orchestrator.batch-size", "32")
    planned = _plan(model, *words)["inference 0"]
    print(f"engine {length}: planned {planned / 1e9:.2f} GB, measured {peak / 1e9:.2f} GB")
    assert planned / FACTOR < peak < planned * FACTOR


def _wait(process: subprocess.Popen, url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError("the engine ended, or did not answer within 120 s")
