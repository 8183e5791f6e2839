"""Rollouts with verifiers v1: `python play_v1.py JOB.json OUT.json`."""

import asyncio
import json
import sys
from pathlib import Path

import verifiers.v1 as vf


async def main(job_path, out_path):
    job = json.loads(Path(job_path).read_text())
    agent = {"harness": {"id": "buckeye-vf-gym"}, "runtime": {"type": "subprocess"}, "max_turns": 8}
    config = vf.resolve_env_config({"taskset": {"id": "buckeye-vf-gym", **job["args"]}, "agent": agent})
    env = vf.load_environment(config)
    client = vf.EvalClientConfig(base_url=job["base_url"], api_key_var="ENGINE_KEY")
    context = vf.ModelContext(model="scripted", client=client, sampling=vf.SamplingConfig(max_tokens=64))
    slots = [slot for task in env.taskset for slot in env.slots(task, 1)]
    async with env.serving():
        episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
    played = [
        {
            "task": trace.task.data.id,
            "reward": trace.reward if trace.ok else None,
            "metrics": dict(trace.metrics),
            "stop": trace.info.get("buckeye", {}).get("stop_reason"),
            "error": None if trace.ok else repr(trace.errors),
            "replies": sum(node.sampled for node in trace.nodes),
            "read": [m.content for m in trace.branches[-1].messages if m.role == "user"]
            if trace.branches
            else [],
        }
        for episode in episodes
        for trace in episode.traces
    ]
    Path(out_path).write_text(json.dumps(played))


asyncio.run(main(*sys.argv[1:]))
