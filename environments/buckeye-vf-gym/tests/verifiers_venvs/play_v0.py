"""Rollouts with verifiers v0: `python play_v0.py JOB.json OUT.json`."""

import json
import sys
from pathlib import Path

import verifiers as vf


def main(job_path, out_path):
    job = json.loads(Path(job_path).read_text())
    env = vf.load_environment("buckeye-vf-gym", **job["args"])
    client = vf.ClientConfig(
        client_type="openai_chat_completions", api_base_url=job["base_url"], api_key_var="ENGINE_KEY"
    )
    outputs = env.generate_sync(env.get_dataset().to_list(), client=client, model="scripted")["outputs"]
    played = [
        {
            "task": output["info"]["task_id"],
            "reward": output["reward"],
            "metrics": output["metrics"],
            "stop": output["stop_condition"],
            "error": output["error"] and output["error"]["error_chain_repr"],
            "replies": len(output["trajectory"]) if "trajectory" in output else None,
            "read": [
                message["content"] for message in output["completion"] if message["role"] != "assistant"
            ],
        }
        for output in json.loads(json.dumps(outputs, default=lambda message: message.model_dump()))
    ]
    Path(out_path).write_text(json.dumps(played))


main(*sys.argv[1:])
