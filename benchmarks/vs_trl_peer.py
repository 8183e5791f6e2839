"""TRL's side of `vs_trl.py`, run in TRL's virtual environment: GRPOTrainer on the letter tasks, on a CPU.

Prints one JSON line per step: seconds, generate, train, reward, and `wall`, the seconds since training began.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}

import torch
import transformers
from datasets import Dataset
from letters import Latency, questions, reward
from trl import GRPOConfig, GRPOTrainer


def arguments() -> argparse.Namespace:
    """Parse the command line, as `vs_trl.py` writes it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--task", default="emit")
    parser.add_argument("--letters", default="e")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--target", type=float, default=2.0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


class Timed(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that measures where its time goes."""

    generating = scoring = training = 0.0

    def _generate(self, prompts: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate(prompts)
        self.generating += time.perf_counter() - start
        return result

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start, before = time.perf_counter(), self.generating
        result = super()._generate_and_score_completions(inputs)
        self.scoring += time.perf_counter() - start - (self.generating - before)
        return result

    def training_step(self, *args: Any, **settings: Any) -> Any:
        start, before = time.perf_counter(), self.generating + self.scoring
        result = super().training_step(*args, **settings)
        self.training += time.perf_counter() - start - (self.generating + self.scoring - before)
        return result


class Report(transformers.TrainerCallback):  # type: ignore[misc]
    """Callback that prints a line per step, and stops at the target."""

    trainer: Timed
    target: float

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()
        self.before = (self.trainer.generating, self.trainer.training)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self.start

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **__: Any) -> None:
        if not logs or "reward" not in logs:
            return
        record = {
            "step": state.global_step,
            "seconds": self.seconds,
            "generate": self.trainer.generating - self.before[0],
            "train": self.trainer.training - self.before[1],
            "reward": float(logs["reward"]),
            "wall": time.perf_counter() - self.began,
        }
        print(json.dumps(record), flush=True)
        if record["reward"] >= self.target:
            control.should_training_stop = True


def main() -> None:
    """Train."""
    args = arguments()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.set_seed(args.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    asked = questions(args.task, 512, letters=args.letters, seed=args.seed)
    rows = [{"prompt": [{"role": "user", "content": q}], "wanted": wanted} for q, wanted in asked]
    pause = Latency(args.latency, args.sigma, args.seed)

    async def rewards(completions: Any, wanted: Any, **_: Any) -> list[float]:
        await asyncio.gather(*(pause.wait() for _ in completions))
        texts = [completion[0]["content"] for completion in completions]
        return [reward(args.task, text, right) for text, right in zip(texts, wanted, strict=True)]

    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=args.prompts * args.group,
            gradient_accumulation_steps=1,
            num_generations=args.group,
            max_completion_length=args.tokens,
            max_steps=args.steps,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            loss_type="dapo",
            beta=0.0,
            bf16=args.bf16,
            gradient_checkpointing=False,
            use_cpu=True,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            seed=args.seed,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Timed(
            model=model,
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[report],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        report.trainer, report.target = trainer, args.target
        trainer.train()


if __name__ == "__main__":
    main()
