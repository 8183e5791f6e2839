"""Score recorded replies with the library of an environment, without Buckeye.

This program runs in the interpreter of the environment. It reads `{"runner", "name", "args", "sessions":
[{"data", "replies"}]}` from stdin, and prints a list with the reward of each session, or null if the library
gives no reward for its replies.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


def reasoning_gym(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the scores of `score_answer` for the extracted answers."""
    library, utils = importlib.import_module("reasoning_gym"), importlib.import_module("reasoning_gym.utils")
    seed, size = args.pop("seed", 0), args.pop("size", 2000)
    splits = {
        "train": (seed, size),
        "eval": (args.pop("eval_seed", seed + 1_000_003), 10 * args.pop("eval_size", 100)),
    }
    args.pop("system_prompt", None)
    args = {key: tuple(value) if isinstance(value, list) else value for key, value in args.items()}
    datasets = {
        split: library.create_dataset(name, seed=first, size=count, **args)
        for split, (first, count) in splits.items()
    }
    rewards: list[float | None] = []
    for session in sessions:
        dataset = datasets[session["data"]["split"]]
        answer = utils.extract_answer(session["replies"][0])
        entry = dataset[session["data"]["index"]]
        rewards.append(float(dataset.score_answer(answer=answer, entry=entry)))
    return rewards


def textarena(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the rewards of games of one player, limited to the range from 0 to 1."""
    library = importlib.import_module("textarena")
    own = ("num_tasks", "num_eval", "seed", "seat", "opponent", "system_prompt")
    settings = {key: value for key, value in args.items() if key not in own}
    rewards: list[float | None] = []
    for session in sessions:
        random.seed(session["data"]["seed"])
        game = library.make(env_id=name, **settings)
        game.reset(num_players=1, seed=session["data"]["seed"])
        done = False
        for reply in session["replies"]:
            game.get_observation()
            done, _ = game.step(action=reply)
        rewards.append(min(1.0, max(0.0, float(game.close()[0][0]))) if done else None)
    return rewards


def verifiers_v0(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the rewards of `generate`, with a client that returns the recorded replies."""
    environment = importlib.import_module("verifiers").load_environment(name, **args)
    clients = importlib.import_module("verifiers.clients")
    types = importlib.import_module("openai.types.chat")

    class RecordedClient(clients.OpenAIChatCompletionsClient):  # type: ignore[name-defined, misc]
        def __init__(self, replies: Sequence[str]) -> None:
            super().__init__(importlib.import_module("openai").AsyncOpenAI(api_key="none"))
            self._replies = iter(replies)

        async def get_native_response(self, *_: Any, **__: Any) -> Any:
            message = {"role": "assistant", "content": next(self._replies)}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            values = {
                "id": "0",
                "object": "chat.completion",
                "created": 0,
                "model": name,
                "choices": [choice],
            }
            return types.ChatCompletion.model_validate(values)

    async def reward(session: Json) -> float | None:
        data = session["data"]
        dataset = environment.get_dataset() if data["split"] == "train" else environment.get_eval_dataset()
        client = RecordedClient(session["replies"])
        made = await environment.generate(
            [dataset[data["row"]]], client, name, {}, independent_scoring=True, on_progress=[]
        )
        output = made["outputs"][0]
        return None if output.get("error") else output["reward"]

    async def rewards() -> list[float | None]:
        return [await reward(session) for session in sessions]

    return asyncio.run(rewards())


RUNNERS = {"reasoning-gym": reasoning_gym, "textarena": textarena, "verifiers-v0": verifiers_v0}

if __name__ == "__main__":
    request = json.load(sys.stdin)
    result = RUNNERS[request["runner"]](request["name"], request["args"], request["sessions"])
    sys.stdout.write("\n" + json.dumps(result) + "\n")
