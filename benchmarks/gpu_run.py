"""A whole run of the `rl` launcher on one device, for benchmarks/gpu.py."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WARM_UP = 1
_SAMPLE_SECONDS = 0.25

Settings = dict[str, Any]
Figures = dict[str, Any]
Report = Callable[[str, Figures], None]


def measure(settings: Settings, report: Report) -> None:
    """Run the `rl` launcher; report medians over all steps except the first."""
    folder = Path(settings["folder"])
    config = folder / "rl.json"
    config.write_text(json.dumps(_run_config(settings, folder / "run")), encoding="utf-8")
    started = time.time()
    with _utilization(settings["device"]) as samples:
        subprocess.run([sys.executable, "-m", "buckeye", "rl", "@", str(config)], check=True)
    figures, first, last = _read_run(folder / "run" / "metrics.jsonl")
    busy = [share for when, share in samples if first <= when <= last]
    figures |= {
        "idle_share": 1 - statistics.mean(busy) if busy else None,
        "first_step_after_seconds": first - started,
        "seconds": time.time() - started,
    }
    report("run", figures | _devices(settings))


@contextmanager
def _utilization(device: str) -> Iterator[list[tuple[float, float]]]:
    """Yield (time, share of the last sampling interval in which a kernel ran), as nvidia-smi reports it."""
    samples: list[tuple[float, float]] = []
    if device != "cuda":
        yield samples
        return
    done = threading.Event()
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]

    def sample() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
            if found.returncode == 0:
                samples.append((time.time(), int(found.stdout.split()[0]) / 100))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def _run_config(settings: Settings, output: Path) -> Settings:
    devices = _devices(settings)
    inference: Settings = {
        "backend": settings["backend"],
        "model": {"device": settings["device"]},
        "max_num_seqs": settings["batch"],
    }
    if settings["device"] == "cuda" and settings["backend"] == "vllm":
        inference["gpu_memory_utilization"] = devices["inference_share"]
    elif settings["device"] == "cuda":
        inference["kv_cache_gb"] = round(devices["inference_share"] * devices["gpu_gb"], 1)
    return {
        "output_dir": str(output),
        "max_steps": WARM_UP + settings["steps"],
        "model": {"name": settings["model"]},
        "inference_gpu_ids": devices["inference_gpu_ids"],
        "trainer_gpu_ids": devices["trainer_gpu_ids"],
        "trainer": {
            "model": {"device": settings["device"], **({"compile": {}} if settings["compile"] else {})},
            "optim": {"lr": 3e-6},
            "seq_len": max(settings["row"], 2 * settings["length"]),
        },
        "orchestrator": {
            "batch_size": settings["batch"],
            "rollouts_per_example": settings["group"],
            "seq_len": 2 * settings["length"] if settings["length"] < 256 else settings["length"] + 128,
            "sampling": {"max_tokens": settings["length"]},
            "env": [{"id": str(HERE / "letters.py"), "args": {"task": "emit"}}],
        },
        "inference": inference,
    }


def _devices(settings: Settings) -> Settings:
    """Return the GPUs of a run: two if available; of a single one the engine gets less than half."""
    from buckeye.launch.preflight.devices import this_machine

    if settings["device"] != "cuda":
        return {"inference_gpu_ids": [0], "trainer_gpu_ids": [1], "inference_share": None, "gpu_gb": None}
    gpus = this_machine().gpus
    if not gpus:
        raise RuntimeError("nvidia-smi shows no GPU that may be used")
    first, last = gpus[0], gpus[:2][-1]
    query = ["nvidia-smi", f"--id={first}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    mebibytes = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    return {
        "inference_gpu_ids": [first],
        "trainer_gpu_ids": [last],
        "inference_share": 0.45 if first == last else 0.8,
        "gpu_gb": round(int(mebibytes) * 2**20 / 1e9, 1),
    }


def _read_run(metrics: Path) -> tuple[Figures, float, float]:
    """Return the figures of a run, and the times when its first and last step ended."""
    from buckeye.monitor.metrics import read_run_metrics

    trained = read_run_metrics(metrics).of("trainer")
    steps = sorted(trained)
    if len(steps) <= WARM_UP:
        raise RuntimeError(f"only {len(steps)} steps are in {metrics}")
    between = [trained[b]["time"] - trained[a]["time"] for a, b in itertools.pairwise(steps)]
    later = [trained[step] for step in steps[WARM_UP:]]

    def median(key: str) -> float:
        return statistics.median(record[key] for record in later)

    seconds = statistics.median(between)
    figures = {
        "step_seconds": seconds,
        "tokens_per_second": median("tokens") / seconds,
        "samples": median("samples"),
        "tokens": median("tokens"),
        **{f"{cause}_seconds": median(f"time/{cause}") for cause in ("wait", "compute", "publish")},
        "mismatch_kl": median("mismatch_kl"),
        "mfu": median("mfu") if "mfu" in later[0] else None,
        "peak_gib": median("peak_memory_gib"),
        "steps": len(steps),
    }
    return figures, trained[steps[0]]["time"], trained[steps[-1]]["time"]
