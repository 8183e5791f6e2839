"""benchmarks/gpu.py on a CPU, with its small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu  # noqa: E402
import gpu_cases  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Settings that all cases share, with the model written."""
    directory = tmp_path_factory.mktemp("gpu") / "model"
    settings = {"model": str(directory), "device": "cpu", "size": "tiny"}
    # embedding 1024 x 64; two layers of q 64^2, k and v 32 x 64 each, o 64^2, MLP 3 x 128 x 64, norms
    # 2 x 64 + 2 x 32; last norm 64
    assert gpu_cases.write_model(settings)["parameters"] == 65536 + 2 * (12288 + 24576 + 192) + 64
    return settings


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["trainer/64/full", "trainer/64/lora"])
def test_the_trainer_takes_steps(model, tmp_path, monkeypatch, name):
    monkeypatch.setenv("BUCKEYE_THREADS", "1")
    case = next(c for c in gpu.all_cases(tiny=True, compiled=False, backend="torch") if c.name == name)
    figures = gpu_cases.train({**model, **case.settings, "steps": 1, "folder": str(tmp_path)})
    # two samples of 64 tokens: 6 (with an adapter on frozen matrices 4) P T + 6 L H D sum(t^2)
    attention = 6 * 2 * 2 * 32 * 2 * 64**2
    matrices = 65536 + 2 * (12288 + 24576)
    adapter = 2 * 16 * (2 * (64 + 64) + 2 * (64 + 32) + 2 * (64 + 128) + (128 + 64))
    products = 4 * matrices + 6 * adapter if name.endswith("lora") else 6 * matrices
    flops = products * 128 + attention
    assert figures["gflops_per_second"] * figures["step_seconds"] == pytest.approx(flops / 1e9)
    assert figures["tokens_per_second"] * figures["step_seconds"] == pytest.approx(128)
    assert figures["mfu"] is None


@pytest.mark.e2e
def test_the_engine_decodes(model, monkeypatch):
    monkeypatch.setenv("BUCKEYE_THREADS", "1")
    figures = gpu_cases.decode({**model, "concurrency": 3, "new_tokens": 5})
    assert (figures["slots"], figures["dtype"], figures["peak_gib"]) == (3, "float32", None)
    assert figures["tokens_per_second"] * figures["step_ms"] == pytest.approx(3 * 1000)


@pytest.mark.slow
def test_the_small_form_runs_on_a_cpu(tmp_path):
    _run(tmp_path, "--device", "cpu", "--tiny", "--only", "trainer/64/full", "engine/4", "rl")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_small_form_runs_on_a_gpu(tmp_path):
    outcomes = _run(tmp_path, "--tiny")
    assert all(o["figures"]["peak_gib"] > 0 for o in outcomes[1:])
    assert outcomes[-1]["figures"]["mismatch_kl"] < 1e-2


def _run(folder: Path, *arguments: str) -> list[dict]:
    result = folder / "result.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments, "--json", str(result)]
    subprocess.run([*command, "--folder", str(folder)], check=True)
    outcomes = json.loads(result.read_text(encoding="utf-8"))
    assert all(outcome["error"] is None for outcome in outcomes)
    assert not list(folder.glob("buckeye_gpu_*"))
    assert outcomes[-1]["figures"]["steps"] == 2
    return outcomes
