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
from gpu_model import SHAPES, make_tokenizer  # noqa: E402

FAILS = "import sys; print('torch.OutOfMemoryError: CUDA out of memory.'); print('bye'); sys.exit(3)"
HANGS = "import time; time.sleep(600)"
WRITES = "import sys; open(sys.argv[3], 'w').write(open(sys.argv[2]).read())"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Settings that all cases share, with the model written."""
    directory = tmp_path_factory.mktemp("gpu") / "model"
    settings = {"model": str(directory), "device": "cpu", "size": "tiny"}
    # embedding 1024 x 64; two layers of q 64^2, k and v 32 x 64 each, o 64^2, MLP 3 x 128 x 64, norms
    # 2 x 64 + 2 x 32; last norm 64
    assert gpu_cases.write_model(settings)["parameters"] == 65536 + 2 * (12288 + 24576 + 192) + 64
    return settings


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


def test_the_engine_decodes(model, monkeypatch):
    monkeypatch.setenv("BUCKEYE_THREADS", "1")
    figures = gpu_cases.decode({**model, "concurrency": 3, "new_tokens": 5})
    assert (figures["slots"], figures["dtype"], figures["peak_gib"]) == (3, "float32", None)
    assert figures["tokens_per_second"] * figures["step_ms"] == pytest.approx(3 * 1000)


def test_every_id_of_the_tokenizer_has_text():
    tokenizer = make_tokenizer(SHAPES["0.6B"]["vocab_size"])
    assert len(tokenizer) == SHAPES["0.6B"]["vocab_size"]
    assert len(tokenizer.decode([len(tokenizer) - 1])) == 4
    assert tokenizer.decode(tokenizer("Write it: é")["input_ids"]) == "Write it: é"


def test_names_choose_cases():
    cases = gpu.all_cases(tiny=False, compiled=False, backend="torch")
    names = [case.name for case in gpu.chosen(cases, ["trainer/16k", "engine/1", "rl"])]
    assert names == ["trainer/16k/full", "trainer/16k/lora", "engine/1", "rl"]
    assert set(gpu.PUBLISHED) < {case.name for case in cases}
    with pytest.raises(ValueError, match="trainer/3k"):
        gpu.chosen(cases, ["trainer/3k"])


@pytest.mark.parametrize(("code", "error"), [(FAILS, "CUDA out of memory"), (HANGS, "0.3 s")])
def test_a_failed_case_is_reported(tmp_path, code, error):
    case = gpu.Case(name="engine/1", part="engine")
    outcome = gpu.run_case(case, tmp_path, deadline=0.3 if code == HANGS else 60, command=_python(code))
    assert (outcome.figures, error in outcome.error) == (None, True)
    assert error in gpu.engine_row(outcome)


@pytest.mark.slow
def test_the_small_form_runs_on_a_cpu(tmp_path):
    _run(tmp_path, "--device", "cpu", "--tiny", "--only", "trainer/64/full", "engine/4", "rl")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_small_form_runs_on_a_gpu(tmp_path):
    outcomes = _run(tmp_path, "--tiny")
    assert all(o["figures"]["peak_gib"] > 0 for o in outcomes[1:])
    assert outcomes[-1]["figures"]["mismatch_kl"] < 1e-2


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _run(folder: Path, *arguments: str) -> list[dict]:
    result = folder / "result.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments, "--json", str(result)]
    subprocess.run([*command, "--folder", str(folder)], check=True)
    outcomes = json.loads(result.read_text(encoding="utf-8"))
    assert all(outcome["error"] is None for outcome in outcomes)
    assert not list(folder.glob("buckeye_gpu_*"))
    assert outcomes[-1]["figures"]["steps"] == 2
    return outcomes
