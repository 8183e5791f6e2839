"""Measurements of benchmarks/gpu.py. Each case is a process, so that it starts with all memory free.

    python benchmarks/gpu_cases.py PART SETTINGS.json RESULT.json

A part calls `report(row, figures)` after each measurement. Reported rows are kept if a later one fails.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_correctness
import gpu_engine
import gpu_run
import gpu_trainer
from gpu_model import make_model

from buckeye.base.process import die_with_parent
from buckeye.base.storage import write_file

Settings = dict[str, Any]
Figures = dict[str, Any]
Report = Callable[[str, Figures], None]


def describe(settings: Settings, report: Report) -> None:
    """Report the device and its two limits, and write the model that all cases use."""
    import torch

    from buckeye.trainer.learner import peak_flops

    device = torch.device(settings["device"])
    on_gpu = device.type == "cuda"
    started = time.perf_counter()
    parameters = make_model(Path(settings["model"]), settings["size"], device=device)
    facts = {
        "parameters": parameters,
        "model_seconds": time.perf_counter() - started,
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "memory_gib": torch.cuda.get_device_properties(device).total_memory / 2**30 if on_gpu else None,
        "peak_flops": peak_flops(device),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **(_limits(device) if on_gpu else {}),
    }
    report("device", facts)


def _limits(device: Any) -> Figures:
    """Return bytes per second of a large copy, read and written, and FLOP/s of a large bfloat16 product."""
    import torch

    source = torch.randn(2**30, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    copied = 2 * source.numel() * source.element_size() / _median_seconds(lambda: target.copy_(source))
    return {"bandwidth": copied, "product_flops": 2 * 8192**3 / _median_seconds(lambda: a @ b)}


def _median_seconds(work: Callable[[], Any]) -> float:
    import torch

    seconds = []
    for _ in range(12):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


PARTS: dict[str, Callable[[Settings, Report], None]] = {
    "device": describe,
    "correctness": gpu_correctness.measure,
    "rl": gpu_run.measure,
    "trainer": gpu_trainer.measure,
    "engine": gpu_engine.measure,
    "rival": gpu_engine.measure_rival,
}


def main() -> None:
    """Measure one case and write its figures to a file, row by row."""
    part, settings, result = sys.argv[1:]
    die_with_parent()
    logging.basicConfig(level=logging.WARNING)
    rows: dict[str, Figures] = {}

    def report(row: str, figures: Figures) -> None:
        rows[row] = figures
        write_file(Path(result), json.dumps(rows))

    PARTS[part](json.loads(Path(settings).read_text(encoding="utf-8")), report)


if __name__ == "__main__":
    main()
