"""Scores of transcripts by verifiers v1: `python v1.py FOLDER MODULE HARNESS < JOB`.

JOB is a JSON list of `{"settings", "row", "said"}`. The output is a list of rewards, metrics, errors, and the
requests to the model.
"""

import asyncio
import contextlib
import json
import os
import sys


async def main(folder, module, harness):
    sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), folder]
    os.environ["PYTHONPATH"] = folder
    import verifiers.v1 as vf
    from replay import Replay

    served = {}
    places = asyncio.Semaphore(8)

    async def play(rollout):
        env, replay = served[json.dumps(rollout["settings"])], Replay()
        replay.play(rollout["said"])
        context = vf.ModelContext(
            model="replay", client=vf.EvalClientConfig(base_url=replay.url, api_key_var="NO_KEY")
        )
        (slot,) = env.slots(list(env.taskset.take(rollout["row"] + 1))[-1])
        async with places:
            episode = await env.run_slot(slot, context)
        (trace,) = episode.traces
        return {
            "reward": trace.reward,
            "metrics": dict(trace.metrics),
            "asked": replay.asked,
            "error": "; ".join(f"{error.type}: {error.message}" for error in trace.errors),
        }

    async with contextlib.AsyncExitStack() as stack:
        job = json.load(sys.stdin)
        for settings in {json.dumps(rollout["settings"]) for rollout in job}:
            config = vf.resolve_env_config(
                {
                    "taskset": {"id": module, **json.loads(settings)},
                    "agent": {"harness": {"id": harness}, "runtime": {"type": "subprocess"}},
                }
            )
            served[settings] = vf.load_environment(config)
            await stack.enter_async_context(served[settings].serving())
        scores = await asyncio.gather(*map(play, job))
    print(json.dumps(scores))


asyncio.run(main(*sys.argv[1:]))
