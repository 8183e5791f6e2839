"""benchmarks/forecast.py on measured trainings."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import forecast  # noqa: E402

HEADER = (
    "device,gpus,model,kind,lora_rank,seq_len,activation,attention,cp,ep,micro_batches,success,error,"
    "mfu_percent,tokens_per_second,step_seconds,peak_gib"
)
SMALL = "NVIDIA H100,1,Qwen/Qwen3-0.6B,rl,16,16384,Recompute,flash_attention_3,1,1,2,True,,11,13000,2.5,5"
LARGE = "NVIDIA H200,8,Qwen/Qwen3-4B,rl,0,16384,Recompute,flash_attention_3,1,1,2,True,,15,27000,4.4,17"
FAILED = (
    "NVIDIA H100 80GB HBM3,1,Qwen/Qwen3-0.6B,sft,0,65536,Recompute,flash_attention_3,1,1,2,False,oom,0,0,0,0"
)


def read(name: str) -> list[forecast.Row]:
    with (BENCHMARKS / name).open() as lines:
        return list(csv.DictReader(lines))


def share_within(rows, name: str, bound: float) -> float:
    product = forecast.Constants(forecast.GPU_COSTS)
    found = [abs(forecast.errors(row, forecast.predict(row, product))[name]) for row in rows]
    return sum(error <= bound for error in found) / len(found)


@pytest.mark.parametrize("name", ["gpu_trainings.csv", "own_trainings.csv"])
def test_product_constants_are_close_to_measured_trainings(name):
    rows = [row for row in forecast.succeeded(read(name)) if row["device"] != "CPU"]
    assert share_within(rows, "memory", 0.2) == 1
    assert share_within(rows, "tokens/s", 0.3) >= 0.8


def test_failed_rows_for_lack_of_memory_do_not_fit():
    lines = forecast.failures(read("gpu_trainings.csv"), forecast.Constants(forecast.GPU_COSTS))
    assert [line.rpartition(", ")[2] for line in lines].count("does not fit") == 2
    assert all("flash_attention_3" in line for line in lines if line.endswith("fits: another cause"))


def test_non_negative_least_squares():
    found = forecast.non_negative_least_squares(
        forecast.np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), forecast.np.array([2.0, -1.0, 1.0])
    )
    assert found == pytest.approx([1.5, 0.0])


@pytest.mark.parametrize("flags", [(), ("--fit",)])
def test_errors_of_a_file(tmp_path, flags):
    file = tmp_path / "rows.csv"
    file.write_text("\n".join([HEADER, SMALL, LARGE, FAILED]) + "\n")
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "forecast.py", file, *flags],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Qwen3-0.6B") == 2
    assert "memory within 20%: " in done.stdout
    assert done.stdout.rstrip().endswith("does not fit")
