"""Measure supervised fine-tuning on short conversations, in rows of increasing numbers of tokens.

    python benchmarks/sft.py               # conversations of 354 tokens, seq_len = 512, 1.4 M parameters

The first row of the table has one conversation in each forward pass. Processor time is affected least by
other processes, and the number of passes not at all. Each line is a separate process.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEQ_LEN, TOKENS, BATCH = 512, 355, 32
BUDGETS = (512, 1024, 2048, 4096, 8192)
_FRAME = 9  # tokens that the template adds to the texts


def write_model(directory: Path, chats: Path) -> None:
    """Write a model of 1.4 M parameters, and conversations of `TOKENS` tokens of its tokenizer."""
    from transformers import AutoTokenizer

    from buckeye.trainer.model.tiny import TinySize, make_tiny_model

    words = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u")]
    chosen = random.Random(0)
    size = TinySize(vocab_size=512, layers=3, hidden=192, max_length=SEQ_LEN)
    texts = [" ".join(chosen.choices(words, k=200)) for _ in range(200)]
    print(f"{make_tiny_model(directory, texts=texts, size=size, seed=0):,} parameters")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with chats.open("w") as file:
        for _ in range(10 * BATCH):
            ids = tokenizer.encode(" ".join(chosen.choices(words, k=TOKENS)))[: TOKENS - 2 * _FRAME]
            texts = [tokenizer.decode(part) for part in (ids[:60], ids[60:])]
            roles = zip(("user", "assistant"), texts, strict=True)
            file.write(json.dumps({"messages": [{"role": r, "content": t} for r, t in roles]}) + "\n")


def measure(model: Path, chats: Path, output: Path, budget: int, steps: int) -> dict[str, float]:
    """Train for some steps in this process."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    from buckeye.config.sft import SFTConfig
    from buckeye.monitor.metrics import read_metrics
    from buckeye.trainer.model.policy import PolicyNetwork
    from buckeye.trainer.sft import run_sft

    passes = []
    register_module_forward_pre_hook(
        lambda module, _: passes.append(time.process_time()) if isinstance(module, PolicyNetwork) else None
    )
    run_sft(
        SFTConfig.model_validate(
            {
                "model": {"name": str(model), "device": "cpu"},
                "data": {"path": chats},
                "output_dir": output,
                "batch_size": BATCH,
                "seq_len": SEQ_LEN,
                "micro_batch_tokens": budget,
                "max_steps": steps,
                "ckpt": None,
            }
        )
    )
    seconds = time.process_time() - passes[0]
    records = [r for r in read_metrics(output / "metrics.jsonl") if r["process"] == "sft"]
    tokens = sum(r["tokens"] for r in records)
    return {
        "passes": len(passes),
        "conversation": tokens / (steps * BATCH),
        "tokens_per_second": tokens / seconds,
        "loss": records[-1]["loss"],
        "peak_gib": records[-1]["peak_memory_gib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.budget is not None:
        folder = arguments.folder
        output = folder / str(arguments.budget)
        found = measure(folder / "model", folder / "chats.jsonl", output, arguments.budget, arguments.steps)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", folder / "chats.jsonl")
        print(
            "| micro_batch_tokens | forward passes | tokens/s of processor time | ratio | last loss | GiB |"
        )
        print("|---:|---:|---:|---:|---:|---:|")
        first = None
        for budget in BUDGETS:
            words = ["--folder", name, "--budget", str(budget), "--steps", str(arguments.steps)]
            done = subprocess.run(
                [sys.executable, __file__, *words], check=True, capture_output=True, text=True
            )
            found = json.loads(done.stdout.splitlines()[-1])
            speed = found["tokens_per_second"]
            first = first or speed
            print(
                f"| {budget} | {found['passes']} | {speed:,.0f} | {speed / first:.2f} | "
                f"{found['loss']:.5f} | {found['peak_gib']:.2f} |",
                flush=True,
            )
        print(f"conversations of {found['conversation']:.0f} tokens")


if __name__ == "__main__":
    main()
