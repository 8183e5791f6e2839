"""Complete runs of a tiny model in the test process.

Engines behind HTTP, orchestrator and trainer are real and run in threads, so a run takes seconds and a patch
of a function can plant a fault.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from buckeye.base.http_server import listen
from buckeye.base.process import RunIdentity, StopFlag
from buckeye.base.request_gate import AccessRules
from buckeye.base.storage import write_file
from buckeye.config.inference import InferenceConfig
from buckeye.config.load import load_config, to_json
from buckeye.config.rl import RLConfig
from buckeye.config.sft import SFTConfig
from buckeye.inference.access import PUBLIC_ROUTES
from buckeye.inference.render import ChatRenderer
from buckeye.inference.server.server import HttpThread, load_engine
from buckeye.inference.server.service import Service
from buckeye.orchestrator.loop import Orchestrator
from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from buckeye.trainer.rl import RLTrainer
from buckeye.trainer.setup import build_learner, find_resume_checkpoint, trainer_process
from buckeye.trainer.sft import run_sft

LETTERS = "abcd"
KEY = "key-of-the-tests"

ENVIRONMENT = '''
"""Words of a few letters."""

import asyncio

from buckeye.envs.base import Outcome, Task

calls = 0


class Words:
    name = "words"

    def tasks(self, split):
        first, count = (0, 40) if split == "train" else (40, 20)
        return [self.task(split, number) for number in range(first, first + count)]

    def task(self, split, number):
        return Task(id=f"{{split}}-{{number}}", messages=({{"role": "user", "content": f"{prompt}"}},))

    async def rollout(self, task, policy):
        global calls
        calls += 1
        number = int(task.id.rpartition("-")[2])
        await asyncio.sleep({late})
        text = (await policy.chat(list(task.messages))).text
        return Outcome(reward=float({reward}), components={{"length": float(len(text))}})


def load_environment():
    return Words()
'''


@dataclass(frozen=True)
class Small:
    """Settings of a small run; the reward is an expression of `text`, `number` (of the task) and `calls`."""

    reward: str = "text[:3].count('a') / 3"
    prompt: str = "say {number}"
    late: float = 0.0
    steps: int = 12
    level: int = 0
    lr: float = 5e-3
    group: int = 4
    batch: int = 32
    max_tokens: int = 6
    engines: int = 1
    seed: int = 0
    resume_at: int | None = None
    words: tuple[str, ...] = ()
    environment: str = ENVIRONMENT


def make_model(folder: Path, name: str = "tiny", *, seed: int = 0) -> Path:
    """Make a tiny model that answers with three-letter words of about equal probability."""
    path, words = folder / name, "say 0 1 2 3 4 5 6 7 8 9 a b c d what comes after"
    make_tiny_model(
        path,
        texts=[words] * 20,
        size=TinySize(vocab_size=310, layers=1, hidden=64, max_length=128),
        seed=seed,
    )
    return path


def warm_model(folder: Path, *, steps: int = 60) -> Path:
    """Make the tiny model and train it to answer."""
    model, letters = make_model(folder), random.Random(0)
    lines = []
    for n in range(1200):
        word = "".join(letters.choices(LETTERS, k=3))
        lines.append(
            f'{{"messages": [{{"role": "user", "content": "say {n % 60}"}}, '
            f'{{"role": "assistant", "content": "{word}"}}]}}'
        )
    (folder / "chat.jsonl").write_text("\n".join(lines))
    words = ["--data.path", folder / "chat.jsonl", "--max-steps", steps, "--batch-size", 32, "--seq-len", 64]
    words += [
        "--model.name",
        model,
        "--model.device",
        "cpu",
        "--optim.lr",
        "1e-2",
        "--output-dir",
        folder / "sft",
    ]
    run_sft(load_config(SFTConfig, [str(word) for word in words]))
    return folder / "sft" / "weights" / f"step_{steps}"


def play(directory: Path, model: Path, small: Small, plant: Sequence[Any] = ()) -> Path:
    """Carry out a small run with patches applied, and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    env = directory.parent / f"{directory.name}_env.py"
    env.write_text(small.environment.format(prompt=small.prompt, late=small.late, reward=small.reward))
    attempts: list[tuple[int, int | None]] = [(small.steps, None)]
    if small.resume_at is not None:
        attempts = [(small.resume_at, None), (small.steps, small.resume_at)]
    with ExitStack() as stack:
        for patch in plant:
            stack.enter_context(patch)
        for attempt, (steps, resumed) in enumerate(attempts, 1):
            config = _config(directory, model, env, small, steps, resumed)
            if attempt == 1:
                write_file(directory / "configs" / "rl.json", to_json(config))
                write_file(directory / "run.json", '{"run_id": "small", "attempt": 1, "attempts": []}')
            known = {"BUCKEYE_RUN_ID": "small", "BUCKEYE_ATTEMPT": str(attempt), "BUCKEYE_INFERENCE_KEY": KEY}
            with mock.patch.dict("os.environ", known):
                _carry_out(config, model, small.engines, RunIdentity(run_id="small", attempt=attempt))
    return directory


def _config(
    directory: Path, model: Path, env: Path, small: Small, steps: int, resumed: int | None
) -> RLConfig:
    words = ["--model.name", model, "--max-steps", steps, "--max-async-level", small.level]
    words += ["--orchestrator.env.0.id", env, "--orchestrator.batch-size", small.batch]
    words += ["--orchestrator.rollouts-per-example", small.group, "--orchestrator.seq-len", 64]
    words += ["--orchestrator.sampling.max-tokens", small.max_tokens, "--trainer.optim.lr", small.lr]
    words += ["--trainer.model.device", "cpu", "--inference.model.device", "cpu", "--output-dir", directory]
    words += ["--orchestrator.seed", small.seed, "--log.level", "warning"]
    if small.resume_at is not None:
        words += ["--ckpt.interval", small.resume_at]
    if resumed is not None:
        words += ["--ckpt.resume-step", resumed]
    return load_config(
        RLConfig, [*map(str, words), *(word.replace("{env}", str(env)) for word in small.words)]
    )


def _carry_out(config: RLConfig, model: Path, engines: int, identity: RunIdentity) -> None:
    failures: list[BaseException] = []
    with ExitStack() as stack:
        urls = [stack.enter_context(_engine(config, model)) for _ in range(engines)]
        client = config.orchestrator.client.model_copy(
            update={"base_url": urls, "api_key_var": "BUCKEYE_INFERENCE_KEY"}
        )
        orchestrator = Orchestrator(config.orchestrator.model_copy(update={"client": client}))

        stop = StopFlag()

        def train() -> None:
            try:
                _train(config, identity, stop)
            except BaseException as error:
                failures.append(error)

        trainer = threading.Thread(target=train, daemon=True)
        trainer.start()
        try:
            asyncio.run(_until_failed(orchestrator, failures))
        except BaseException:
            stop.requested = True
            raise
        finally:
            trainer.join(60)
    if failures:
        raise failures[0]


async def _until_failed(orchestrator: Orchestrator, failures: Sequence[BaseException]) -> None:
    """Run the orchestrator until it ends or the trainer has failed."""
    running = asyncio.create_task(orchestrator.run())
    while not running.done() and not failures:
        await asyncio.wait([running], timeout=0.2)
    if failures:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    else:
        running.result()


def _train(config: RLConfig, identity: RunIdentity, stop: StopFlag) -> None:
    trainer = config.trainer
    with trainer_process(trainer, "trainer") as ranks:
        learner = build_learner(
            trainer, ranks, find_resume_checkpoint(trainer, ranks), max_steps=trainer.max_steps
        )
        loop = RLTrainer(trainer, learner, stop, identity)
        with loop.output:
            loop.run()


@contextmanager
def _engine(config: RLConfig, model: Path) -> Iterator[str]:
    inference = config.inference or InferenceConfig()
    inference = inference.model_copy(
        update={"output_dir": config.output_dir, "max_num_seqs": 64, "kv_cache_gb": 0.05}
    )
    engine = load_engine(inference, model)
    service = Service(
        engine,
        model_name=str(model),
        directory=model,
        weights_dir=config.output_dir,
        renderer=ChatRenderer(model),
        seed=0,
    )
    listener = listen("127.0.0.1", 0, change="")
    rules = AccessRules(host="127.0.0.1", key=KEY, hosts=(), origins=(), public=PUBLIC_ROUTES, key_hint="")
    http = HttpThread(service, listener, rules)
    http.start()
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        engine.stop()
        http.stop()
        thread.join(10)


if __name__ == "__main__":
    import sys
    import time

    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    root.mkdir(exist_ok=True)
    begun = time.time()
    warm = root / "sft/weights/step_60"
    if not warm.exists():
        warm_model(root)
    print("warm", time.time() - begun)
    begun = time.time()
    play(root / sys.argv[2], warm, Small())
    print("run", time.time() - begun)
