"""What verifiers v1 itself makes of transcripts: `python v1.py FOLDER MODULE HARNESS < JOB`, a JSON list of
`{"settings", "row", "said"}`; prints a list of rewards, metrics, errors, and what
the model was asked."""

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

    replay = Replay()
    context = vf.ModelContext(
        model="replay", client=vf.EvalClientConfig(base_url=replay.url, api_key_var="NO_KEY")
    )
    scores = []
    async with contextlib.AsyncExitStack() as stack:
        served = {}
        for rollout in json.load(sys.stdin):
            settings = json.dumps(rollout["settings"])
            if settings not in served:
                config = vf.resolve_env_config(
                    {
                        "taskset": {"id": module, **rollout["settings"]},
                        "agent": {"harness": {"id": harness}, "runtime": {"type": "subprocess"}},
                    }
                )
                served[settings] = vf.load_environment(config)
                await stack.enter_async_context(served[settings].serving())
            env = served[settings]
            task = list(env.taskset.take(rollout["row"] + 1))[-1]
            replay.play(rollout["said"])
            (slot,) = env.slots(task)
            episode = await env.run_slot(slot, context)
            (trace,) = episode.traces
            scores.append(
                {
                    "reward": trace.reward,
                    "metrics": dict(trace.metrics),
                    "asked": replay.asked,
                    "error": "; ".join(f"{error.type}: {error.message}" for error in trace.errors),
                }
            )
    print(json.dumps(scores))


asyncio.run(main(*sys.argv[1:]))
