"""Measure forward and backward passes of a training step, against padded transformers with the same weights.

    python benchmarks/trainer.py --model small     64 samples of 25 + 64 tokens, in groups of 8
    python benchmarks/trainer.py --model medium    the same with 26 million parameters
    python benchmarks/trainer.py --head            memory of the output layer with a vocabulary of 151,936

Each row adds to the one above it. On a CPU the time is processor time (best of several), which other
processes affect little; each row runs in a separate process, which gives its own peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from buckeye.trainer.data.packing import PackedMicroBatch, pack_micro_batch
from buckeye.trainer.model.attention import PACKED_ATTENTION
from buckeye.trainer.model.logprobs import token_logprobs
from buckeye.trainer.model.policy import PolicyNetwork, make_policy

MODELS = {
    "small": {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1024},
    "medium": {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 2048},
}
ROWS = (
    "padded transformers, float32",
    "padded transformers, bfloat16",
    "packed, plain head, float32",
    "+ chunked head",
    "+ shared prefixes",
    "+ bfloat16",
)
HEAD_VOCABULARY, HEAD_HIDDEN = 151_936, 512


@dataclass(frozen=True)
class Workload:
    """Workload of `groups` prompts with `group` completions each."""

    groups: int = 8
    group: int = 8
    prompt: int = 25
    completion: int = 64

    def samples(self) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 1000, self.prompt) for _ in range(self.groups)]
        return [
            np.concatenate([prompt, rng.integers(0, 1000, self.completion)]).astype(np.int32)
            for prompt in prompts
            for _ in range(self.group)
        ]


def build(name: str, attention: str) -> PreTrainedModel:
    shape = MODELS[name]
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape,
        num_key_value_heads=shape["num_attention_heads"] // 2,
        head_dim=64,
        intermediate_size=3 * shape["hidden_size"],
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def padded_pass(name: str, work: Workload, dtype: torch.dtype, device: torch.device) -> Callable[[], float]:
    """Return the pass over one padded batch of all samples.

    It computes logits of the completions only, as trainers on transformers do.
    """
    model = build(name, "sdpa").to(device)
    ids = torch.from_numpy(np.stack(work.samples())).long().to(device)
    mask = torch.ones_like(ids)
    targets = ids[:, work.prompt :, None]

    def run() -> float:
        model.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(
                input_ids=ids, attention_mask=mask, logits_to_keep=work.completion + 1, use_cache=False
            ).logits[:, :-1]
        log_p = logits.float().log_softmax(-1)
        with torch.no_grad():
            _ = -(log_p.exp() * log_p).sum(-1)
        loss = -log_p.gather(2, targets).mean()
        loss.backward()
        return loss.item()

    return run


def plain_head(policy: PolicyNetwork, row: PackedMicroBatch) -> Tensor:
    hidden = policy.run_layers(row).index_select(0, row.sources)
    log_p = (hidden @ policy.head_weight.to(hidden.dtype).t()).float().log_softmax(-1)
    with torch.no_grad():
        _ = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, row.targets[:, None]).squeeze(1)


def packed_pass(name: str, work: Workload, row_name: str, device: torch.device) -> Callable[[], float]:
    level = ROWS.index(row_name)
    dtype = "bfloat16" if level >= 5 else "float32"
    model = build(name, PACKED_ATTENTION).to(device)
    policy = make_policy(model, name, device, flash=True, compute_dtype=dtype)
    samples = work.samples()
    masks = [np.arange(len(ids)) >= work.prompt for ids in samples]

    def run() -> float:
        model.zero_grad()
        with policy.cast_weights():
            row = pack_micro_batch(samples, masks, device, share_prefixes=level >= 4)
            if level >= 3:
                logprobs = policy(row, torch.ones(len(row.targets), device=device))[0]
            else:
                logprobs = plain_head(policy, row)
            loss = -logprobs.mean()
            loss.backward()
        return loss.item()

    return run


def best_seconds(
    run: Callable[[], float], repeats: int, device: torch.device, threads: int
) -> tuple[float, float]:
    """Return (seconds, loss): processor time of the CPU divided by its threads, or wall time of a GPU."""
    loss = run()
    seconds = []
    for _ in range(repeats):
        started = time.process_time() if device.type == "cpu" else time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        else:
            seconds.append((time.process_time() - started) / threads)
    return min(seconds), loss


def peak_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(arguments.threads)
    device, work = torch.device(arguments.device), Workload()
    if arguments.row.startswith("padded"):
        dtype = torch.float32 if arguments.row.endswith("float32") else torch.bfloat16
        run = padded_pass(arguments.model, work, dtype, device)
    else:
        run = packed_pass(arguments.model, work, arguments.row, device)
    before = peak_mib(device)
    seconds, loss = best_seconds(run, arguments.repeats, device, arguments.threads)
    return {"seconds": seconds, "loss": loss, "peak_mib": peak_mib(device) - before}


def measure_head(row: str, tokens: int, device: torch.device) -> dict[str, float]:
    """Return the peak memory beyond the inputs and their gradients."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HEAD_HIDDEN, device=device).requires_grad_()
    weight = torch.randn(HEAD_VOCABULARY, HEAD_HIDDEN, device=device).mul_(0.05).requires_grad_()
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    targets = torch.randint(0, HEAD_VOCABULARY, (tokens,), device=device)
    before, started = peak_mib(device), time.process_time()
    if row == "chunked":
        logprobs = token_logprobs(hidden, weight, targets, torch.ones(tokens, device=device))[0]
    else:
        logprobs = (hidden @ weight.t()).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    logprobs.sum().backward()
    return {"seconds": time.process_time() - started, "peak_mib": peak_mib(device) - before}


def in_process(arguments: list[str]) -> dict[str, float]:
    output = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], *arguments], check=True, capture_output=True, text=True
    )
    return json.loads(output.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048, 8192])
    parser.add_argument("--naive-up-to", type=int, default=2048, help="tokens; beyond it needs much memory")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row and arguments.head:
        name, tokens = arguments.row.split()
        print(json.dumps(measure_head(name, int(tokens), torch.device(arguments.device))))
    elif arguments.row:
        print(json.dumps(measure(arguments)))
    elif arguments.head:
        print(f"{'head':10s} {'tokens':>7s} {'MiB':>8s} {'seconds':>8s}")
        for tokens in arguments.tokens:
            for name in ("naive", "chunked") if tokens <= arguments.naive_up_to else ("chunked",):
                found = in_process(["--row", f"{name} {tokens}"])
                print(f"{name:10s} {tokens:7d} {found['peak_mib']:8.0f} {found['seconds']:8.2f}", flush=True)
    else:
        print(f"{'':32s} {'seconds':>8s} {'of float32':>10s} {'of bfloat16':>11s} {'MiB':>6s} {'loss':>7s}")
        results: list[dict[str, float]] = []
        for row in ROWS:
            results.append(found := in_process(["--row", row]))
            ratios = [
                f"{found['seconds'] / results[i]['seconds']:.2f}" if i < len(results) else "" for i in (0, 1)
            ]
            figures = f"{found['seconds']:8.3f} {ratios[0]:>10s} {ratios[1]:>11s} {found['peak_mib']:6.0f}"
            print(f"{row:32s} {figures} {found['loss']:7.4f}", flush=True)


if __name__ == "__main__":
    main()
