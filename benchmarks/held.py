"""Measure the memory that the orchestrator holds for each token of its rollouts.

    python benchmarks/held.py [--rollouts 200] [--turns 4] [--prompt 1000] [--tokens 1000] [--results 200]

Rollouts of several turns run through the real runner, recording policy and client. The server is another
process (`client_server.py`), which takes 10 s for a reply. A token is four characters of text. Prints the
memory that Python has allocated (tracemalloc) while all rollouts wait for their last reply, and after it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buckeye.base.process import raise_open_files_limit
from buckeye.envs.base import Outcome, Policy, Task
from buckeye.inference.client import InferenceClient, SamplingParams
from buckeye.inference.render import Conversation
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.rollout import InFlightGroup
from buckeye.orchestrator.rollout_runner import RecordingRolloutRunner

SECONDS = 10.0
WORDS = 60000


class HexRenderer:
    """Renderer whose token is a hexadecimal number of four digits."""

    stop_token_ids = ()
    vocab_size = 1 << 16
    family = None

    def prompt_text(self, messages: Any, tools: Any = ()) -> str:
        return "".join(f"{message['content']}ffff" for message in messages)

    def render(self, messages: Any, tools: Any = ()) -> Conversation:
        text = self.prompt_text(messages)
        return Conversation(ids=self.encode(text), text=text, messages=tuple(messages))

    def extend(
        self,
        conversation: Any,
        sampled: Sequence[int],
        messages: Any,
        tools: Any = (),
        *,
        reply: Any = None,
    ) -> Any:
        text = self.prompt_text(messages)
        rest = self.encode(text[len(conversation.text) + 4 * len(sampled) :])
        return Conversation(ids=[*conversation.ids, *sampled, *rest], text=text, messages=tuple(messages))

    def parse(self, conversation: Any, sampled: Sequence[int], text: str | None = None) -> dict[str, Any]:
        return {"role": "assistant", "content": self.decode(sampled) if text is None else text}

    def encode(self, text: str) -> list[int]:
        return [int(text[i : i + 4], 16) for i in range(0, len(text), 4)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{token:04x}" for token in ids)


class Turns:
    """Environment whose results have a fixed number of tokens. `last` counts rollouts in their last turn."""

    name = "turns"

    def __init__(self, turns: int, results: int) -> None:
        self._turns, self._results, self.last = turns, results, 0

    def tasks(self, split: str) -> Sequence[Task]:
        return ()

    async def rollout(self, task: Task, policy: Policy) -> Outcome:
        messages = list(task.messages)
        for turn in range(self._turns):
            self.last += turn == self._turns - 1
            reply = await policy.chat(messages)
            messages += [reply.message, {"role": "user", "content": _text(turn, self._results)}]
        return Outcome(reward=1.0)


def _text(seed: int, tokens: int) -> str:
    return "".join(f"{(seed * 7 + 13 * i) % WORDS:04x}" for i in range(tokens))


async def measure(args: argparse.Namespace, url: str) -> None:
    """Run all rollouts at once, and print what is held."""
    async with InferenceClient([url], api_key=None, timeout=600, model="m") as client:
        await client.wait_ready(60)
        environment = Turns(args.turns, args.results)
        renderer: Any = HexRenderer()
        runner = RecordingRolloutRunner(
            sampler=client,
            renderer=renderer,
            params=SamplingParams(max_tokens=args.tokens),
            seq_len=1 << 20,
            seed=0,
            timeout=600,
            retries=0,
        )
        env: Any = environment
        named = NamedEnvironment(name="turns", environment=env)
        prompts = [({"role": "user", "content": _text(i, args.prompt)},) for i in range(args.rollouts)]
        tasks = [Task(id=str(i), messages=prompt) for i, prompt in enumerate(prompts)]
        gc.collect()
        tracemalloc.start()
        running = [runner.start(named, task, i, flight=InFlightGroup()) for i, task in enumerate(tasks)]
        while environment.last < args.rollouts:
            await asyncio.sleep(0.1)
        await asyncio.sleep(SECONDS / 4)
        before_last = args.prompt + (args.turns - 1) * (args.tokens + args.results)
        _report("in flight", before_last, args.rollouts)
        rollouts = await asyncio.gather(*running)
        del running
        assert all(rollout.turns == args.turns for rollout in rollouts), rollouts[0].outcome
        _report("finished", before_last + args.tokens, args.rollouts)


def _report(state: str, tokens: int, rollouts: int) -> None:
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] / rollouts
    beyond = max(0.0, held - 20_000) / tokens
    print(
        f"{state:10} {held / 1e3:7.1f} kB a rollout of {tokens} tokens: 20 kB and {beyond:.1f} bytes a token"
    )


def main() -> None:
    """Start the server and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, value in {"rollouts": 200, "turns": 4, "prompt": 1000, "tokens": 1000, "results": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    raise_open_files_limit()
    server = [sys.executable, str(Path(__file__).with_name("client_server.py")), "4096", "0"]
    with subprocess.Popen([*server, str(args.tokens), str(SECONDS)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            asyncio.run(measure(args, f"http://127.0.0.1:{int(process.stdout.readline())}"))
        finally:
            process.kill()


if __name__ == "__main__":
    main()
