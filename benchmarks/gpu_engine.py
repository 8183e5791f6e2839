"""Sampling on one device with the embedded engine and with transformers, for benchmarks/gpu.py."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_model import SHAPES
from gpu_trainer import wait_for

GROUP = 16  # rollouts of one prompt
_CACHE_SHARE = 0.85  # of the free memory; the rest is for weights and logits

Settings = dict[str, Any]
Figures = dict[str, Any]
Report = Callable[[str, Figures], None]


def measure(settings: Settings, report: Report) -> None:
    """Sample with the embedded engine, without HTTP, with each number of sequences in `counts`.

    Groups of 16 share a prompt of `prompt` tokens; each sequence gets `new_tokens`.
    """
    import torch

    from buckeye.config.inference import InferenceConfig
    from buckeye.inference.server.server import load_engine

    counts, new_tokens, prompt = settings["counts"], settings["new_tokens"], settings["prompt"]
    directory, device = Path(settings["model"]), torch.device(settings["device"])
    max_len = prompt + new_tokens
    config = InferenceConfig.model_validate(
        {
            "model": {"name": str(directory), "device": settings["device"], "max_model_len": max_len},
            "max_num_seqs": max(counts),
            "kv_cache_gb": _cache_gb(directory, device, max(counts), max_len),
        }
    )
    engine = load_engine(config, directory)
    cache = engine.decoder.cache
    _generate(engine, settings, 1, new_tokens=min(8, new_tokens))
    for count in counts:
        _generate(engine, settings, count, new_tokens=min(8, new_tokens))
        wait_for(device)
        started = time.perf_counter()
        steps = _generate(engine, settings, count, new_tokens=new_tokens)
        seconds = time.perf_counter() - started
        running = min(count, cache.slots)
        full = [step for step in steps if step.running == running and not step.prefilled]
        step_seconds = statistics.median(step.seconds for step in full)
        read = _bytes_read(engine, running, statistics.mean(step.context for step in full))
        report(
            str(count),
            {
                "tokens_per_second": running / step_seconds,
                "with_prompts_per_second": count * new_tokens / seconds,
                "step_ms": 1000 * step_seconds,
                "bytes_per_step": read,
                "slots": cache.slots,
                "dtype": str(cache.kv.dtype).removeprefix("torch."),
                "peak_gib": torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None,
            },
        )


def _bytes_read(engine: Any, sequences: int, context: float) -> float:
    """Return the minimum bytes that a decode step reads: each weight, visible key and visible value once."""
    kv = engine.decoder.cache.kv
    a_token = kv.shape[0] * kv.shape[2] * kv.shape[4] * kv.element_size()
    return engine.decoder.weights.num_parameters * kv.element_size() + sequences * context * a_token


def _cache_gb(directory: Path, device: Any, concurrency: int, max_len: int) -> float:
    """Return the cache size for all sequences, or for as many as fit."""
    import psutil
    import torch

    from buckeye.inference.engine.architecture import read_spec
    from buckeye.inference.engine.kv_cache import slot_bytes
    from buckeye.inference.engine.weights import Checkpoint, auto_dtype

    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    dtype = auto_dtype(Checkpoint(directory), device)
    wanted = concurrency * slot_bytes(read_spec(directory), max_len, dtype)
    return min(1.01 * wanted, _CACHE_SHARE * free) / 1e9


class _Step:
    """One engine step: seconds, running sequences, whether prompts were prefilled, and mean context."""

    def __init__(self, seconds: float, running: int, prefilled: bool, context: float) -> None:
        self.seconds, self.running, self.prefilled, self.context = seconds, running, prefilled, context


def _prompts(settings: Settings, count: int) -> list[list[int]]:
    draw = random.Random(count)
    vocab = SHAPES[settings["size"]]["vocab_size"]
    different = [
        [draw.randrange(vocab) for _ in range(settings["prompt"])] for _ in range(-(-count // GROUP))
    ]
    return [different[i // GROUP] for i in range(count)]


def _generate(engine: Any, settings: Settings, count: int, *, new_tokens: int) -> list[_Step]:
    """Sample until all sequences end; return the steps."""
    from buckeye.inference.engine.sequences import Sequence
    from buckeye.inference.types import SamplingParams

    sequences = [
        Sequence(tuple(prompt), SamplingParams(max_tokens=new_tokens, seed=seed))
        for seed, prompt in enumerate(_prompts(settings, count))
    ]
    engine.submit(sequences)
    steps, more = [], True
    while more:
        before, started = engine.counters["prompt_tokens"], time.perf_counter()
        more = engine.step()
        seconds, running = time.perf_counter() - started, len(engine.running)
        context = float(engine.running.position[:running].mean()) if running else 0.0
        steps.append(_Step(seconds, running, engine.counters["prompt_tokens"] > before, context))
    for sequence in sequences:
        if sequence.error is not None or len(sequence.token_ids) != new_tokens:
            raise RuntimeError(f"a sequence ended after {len(sequence.token_ids)} tokens: {sequence.error}")
    return steps


def measure_rival(settings: Settings, report: Report) -> None:
    """Sample as `measure` does with `generate_batch` of transformers; the second of two calls is timed."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    device, new_tokens = torch.device(settings["device"]), settings["new_tokens"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).to(device).eval()
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=True, eos_token_id=-1, pad_token_id=0)
    for count in settings["counts"]:
        prompts = _prompts(settings, count)
        for _ in range(2):
            started = time.perf_counter()
            results = model.generate_batch(prompts, generation, persistent_manager=True)
            seconds = time.perf_counter() - started
        tokens = sum(len(result.generated_tokens) for result in results.values())
        if tokens != count * new_tokens:
            raise RuntimeError(f"{tokens} tokens instead of {count * new_tokens}")
        report(str(count), {"with_prompts_per_second": tokens / seconds})
