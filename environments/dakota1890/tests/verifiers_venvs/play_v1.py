"""Rollouts with verifiers v1: `python play_v1.py JOB.json OUT.json`; the API key is in ENGINE_KEY."""

import asyncio
import json
import sys
from pathlib import Path

import verifiers.v1 as vf


async def play(job, split):
    agent = {"harness": {"id": job["harness"]}, "runtime": {"type": "subprocess"}, "max_turns": 8}
    taskset = {"id": job["env"], **job["args"], **({"split": split} if len(job["splits"]) > 1 else {})}
    env = vf.load_environment(vf.resolve_env_config({"taskset": taskset, "agent": agent}))
    endpoint = {"base_url": job["base_url"], "api_key_var": "ENGINE_KEY"}
    renders = split == "train" and "renderer" in job
    client = (
        vf.TrainClientConfig(**endpoint, renderer_model_name=job["renderer"])
        if renders
        else vf.EvalClientConfig(**endpoint)
    )
    sampling = vf.SamplingConfig(**job["sampling"])
    context = vf.ModelContext(model=job["model"], client=client, sampling=sampling)
    tasks = list(env.taskset)[: job["tasks"]]
    slots = [slot for task in tasks for slot in env.slots(task, job["rollouts"])]
    async with env.serving():
        episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
    return [record(trace) for episode in episodes for trace in episode.traces]


def record(trace):
    branch = trace.branches[-1] if trace.branches else None
    return {
        "task_id": trace.task.data.id,
        "answer": getattr(trace.task.data, "answer", None),
        "reply": trace.last_reply,
        "read": [message.content for message in branch.messages if message.role == "user"] if branch else [],
        "replies": sum(node.sampled for node in trace.nodes),
        "truncated": trace.is_truncated,
        "reward": trace.reward if trace.ok else None,
        "metrics": dict(trace.metrics),
        "error": None if trace.ok else repr(trace.errors),
        "token_ids": list(branch.token_ids) if branch else [],
        "sampled": list(branch.sampled_mask) if branch else [],
        "logprobs": list(branch.logprobs) if branch else [],
    }


async def main(job_path, out_path):
    job = json.loads(Path(job_path).read_text())
    Path(out_path).write_text(json.dumps({split: await play(job, split) for split in job["splits"]}))


asyncio.run(main(*sys.argv[1:]))
