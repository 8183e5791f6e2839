"""Rollouts with verifiers v0: `python play_v0.py JOB.json OUT.json`; the API key is in ENGINE_KEY."""

import json
import sys
from pathlib import Path

import verifiers as vf


def main(job_path, out_path):
    job = json.loads(Path(job_path).read_text())
    env = vf.load_environment(job["env"], **job["args"])
    client = vf.ClientConfig(
        client_type="openai_chat_completions", api_base_url=job["base_url"], api_key_var="ENGINE_KEY"
    )

    def play(split):
        tasks = (env.get_dataset() if split == "train" else env.get_eval_dataset()).to_list()
        rows = tasks[: job["tasks"]] * job["rollouts"]
        generated = env.generate_sync(rows, client=client, model=job["model"], sampling_args=job["sampling"])
        outputs = json.dumps(generated["outputs"], default=lambda message: message.model_dump())
        return [record(output) for output in json.loads(outputs)]

    Path(out_path).write_text(json.dumps({split: play(split) for split in job["splits"]}))


def record(output):
    said = [message for message in output["completion"] or () if message["role"] == "assistant"]
    read = [message["content"] for message in output["completion"] or () if message["role"] != "assistant"]
    return {
        "task_id": output["info"]["task_id"],
        "answer": output.get("answer"),
        "reply": said[-1]["content"] if said else None,
        "replies": len(said),
        "read": read,
        "truncated": output["is_truncated"],
        "reward": output["reward"],
        "metrics": output["metrics"],
        "error": output["error"] and output["error"]["error_chain_repr"],
    }


main(*sys.argv[1:])
