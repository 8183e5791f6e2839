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
import gpu_correctness  # noqa: E402
import gpu_engine  # noqa: E402
import gpu_trainer  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Settings that all cases share; the model is written to disk."""
    directory = tmp_path_factory.mktemp("gpu") / "model"
    settings = {"model": str(directory), "device": "cpu", "size": "tiny"}
    # embedding 1024 x 64; two layers of q 64^2, k and v 32 x 64 each, o 64^2, MLP 3 x 128 x 64, norms 2 x 64
    # + 2 x 32; last norm 64
    facts = _rows(gpu_cases.describe, settings)["device"]
    assert facts["parameters"] == 65536 + 2 * (12288 + 24576 + 192) + 64
    return settings


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_trainer_takes_steps(model, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("BUCKEYE_THREADS", "1")
    case = next(c for c in gpu.all_cases(tiny=True, backend="torch") if c.name == f"trainer/{kind}")
    rows = [row | {"steps": 1} for row in case.settings["rows"]]
    settings = {**model, **case.settings, "rows": rows, "folder": str(tmp_path)}
    figures = _rows(gpu_trainer.measure, settings)["64"]
    # two samples of 64 tokens: 6 (with an adapter on frozen matrices 4) P T + 6 L H D sum(t^2)
    attention = 6 * 2 * 2 * 32 * 2 * 64**2
    matrices = 65536 + 2 * (12288 + 24576)
    adapter = 2 * 16 * (2 * (64 + 64) + 2 * (64 + 32) + 2 * (64 + 128) + (128 + 64))
    products = 4 * matrices + 6 * adapter if kind == "lora" else 6 * matrices
    flops = products * 128 + attention
    assert figures["gflops_per_second"] * figures["step_seconds"] == pytest.approx(flops / 1e9)
    assert figures["tokens_per_second"] * figures["step_seconds"] == pytest.approx(128)
    assert figures["mfu"] is None


@pytest.mark.e2e
def test_the_engine_decodes(model, monkeypatch):
    monkeypatch.setenv("BUCKEYE_THREADS", "1")
    rows = _rows(gpu_engine.measure, {**model, "counts": [3], "prompt": 8, "new_tokens": 12})
    figures = rows["3"]
    assert (figures["slots"], figures["dtype"], figures["peak_gib"]) == (3, "float32", None)
    assert figures["tokens_per_second"] * figures["step_ms"] == pytest.approx(3 * 1000)
    weights, a_token = 4 * (65536 + 2 * (12288 + 24576 + 192) + 64), 4 * 2 * 2 * 32
    assert weights + 3 * 8 * a_token < figures["bytes_per_step"] < weights + 3 * 20 * a_token


@pytest.mark.slow
def test_the_small_form_runs_on_a_cpu(tmp_path):
    outcomes = _run(tmp_path, "--device", "cpu", "--tiny")
    assert [o["name"] for o in outcomes[1:]] == [c.name for c in gpu.all_cases(tiny=True, backend="torch")]
    assert outcomes[2]["rows"]["run"]["steps"] == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_small_form_runs_on_a_gpu(tmp_path):
    outcomes = _run(tmp_path, "--tiny")
    assert outcomes[2]["rows"]["run"]["mismatch_kl"] < 1e-2


def test_what_did_not_run_is_in_the_page(tmp_path):
    facts = {"device": "CPU", "torch": "2", "parameters": 1, "peak_flops": None}
    outcomes = [
        gpu.Outcome(name="device", part="device", seconds=1, rows={"device": facts}),
        gpu.Outcome(name="rl/64", part="rl", seconds=0, error="no time was left"),
        gpu.Outcome(
            name="trainer/full", part="trainer", seconds=2, rows={"2k": {"error": "CUDA out of memory"}}
        ),
    ]
    page = gpu.page(outcomes)
    assert "- rl/64: no time was left" in page
    assert "| full | 2k | CUDA out of memory |" in page


def test_a_limit_that_is_passed_fails_the_case(model, tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_correctness.LIMITS, "sync", (("different_tensors", "below", 0),))
    monkeypatch.setattr(gpu_correctness, "make_model", lambda *_, **__: None)
    monkeypatch.setattr(gpu_correctness, "_gradient", lambda *_: None)
    monkeypatch.setattr(
        gpu_correctness, "_compared", lambda *_: dict.fromkeys(_NAMES, 0.0) | {"gradient_cosine": 1.0}
    )
    pair = type(
        "Pair",
        (),
        {"compare": lambda _: dict.fromkeys(_NAMES, 0.0), "update": lambda *_: dict.fromkeys(_NAMES, 0)},
    )
    monkeypatch.setattr(gpu_correctness, "_Pair", lambda *_: pair())
    with pytest.raises(RuntimeError, match="sync: different_tensors"):
        _rows(gpu_correctness.measure, {**model, "folder": str(tmp_path)})


_NAMES = {name for limits in gpu_correctness.LIMITS.values() for name, *_ in limits}


def _rows(part, settings: dict) -> dict:
    rows: dict = {}
    part(settings, rows.__setitem__)
    return rows


def _run(folder: Path, *arguments: str) -> list[dict]:
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu.py"),
        *arguments,
        "--results",
        str(folder),
        "--within",
        "900",
    ]
    subprocess.run([*command, "--folder", str(folder)], check=True)
    [result] = folder.glob("*.json")
    outcomes = json.loads(result.read_text(encoding="utf-8"))
    assert all(outcome["error"] is None for outcome in outcomes)
    assert not list(folder.glob("buckeye_gpu_*"))
    return outcomes
