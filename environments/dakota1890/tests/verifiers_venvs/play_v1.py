"""Rollouts with verifiers v1: `python play_v1.py JOB.json OUT.json`; the API key is in ENGINE_KEY."""

import asyncio
import json
import sys
from pathlib import Path

import verifiers.v1 as vf


async def play(job, split, client):
    config = vf.resolve_env_config(
        {
            "taskset": {"id": "harleycooper/dakota1890", "split": split, **job["args"]},
            "agent": {"harness": {"id": "one_turn_harness"}, "runtime": {"type": "subprocess"}},
        }
    )
    env = vf.load_environment(config)
    context = vf.ModelContext(
        model=job["model"],
        client=client,
        sampling=vf.SamplingConfig(temperature=job["temperature"], max_tokens=job["max_tokens"]),
    )
    tasks = list(env.taskset.take(job["tasks"]))
    slots = [slot for task in tasks for slot in env.slots(task, job["rollouts"])]
    async with env.serving():
        episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
    return [record(trace) for episode in episodes for trace in episode.traces]


def record(trace):
    branch = trace.branches[-1] if trace.branches else None
    return {
        "task_id": trace.task.data.id,
        "answer": trace.task.data.answer,
        "reply": trace.last_reply,
        "truncated": trace.is_truncated,
        "reward": trace.reward,
        "metrics": dict(trace.metrics),
        "error": None if trace.ok else repr(trace.errors),
        "token_ids": list(branch.token_ids) if branch else [],
        "sampled": list(branch.sampled_mask) if branch else [],
        "logprobs": list(branch.logprobs) if branch else [],
    }


async def main(job_path, out_path):
    job = json.loads(Path(job_path).read_text())
    endpoint = {"base_url": job["base_url"], "api_key_var": "ENGINE_KEY"}
    train = vf.TrainClientConfig(**endpoint, renderer_model_name=job["model"])
    played = {
        "train": await play(job, "train", train),
        "eval": await play(job, "eval", vf.EvalClientConfig(**endpoint)),
    }
    Path(out_path).write_text(json.dumps(played))


asyncio.run(main(*sys.argv[1:]))
