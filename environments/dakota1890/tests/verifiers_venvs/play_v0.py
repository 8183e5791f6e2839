"""Rollouts with verifiers v0: `python play_v0.py JOB.json OUT.json`; the API key is in ENGINE_KEY."""

import json
import sys
from pathlib import Path

import verifiers as vf


def main(job_path, out_path):
    job = json.loads(Path(job_path).read_text())
    env = vf.load_environment("harleycooper/dakota1890", **job["args"])
    sampling = {"max_tokens": job["max_tokens"], "temperature": job["temperature"]}
    client = vf.ClientConfig(
        client_type="openai_chat_completions", api_base_url=job["base_url"], api_key_var="ENGINE_KEY"
    )

    def play(dataset):
        outputs = env.generate_sync(
            dataset.select(range(job["tasks"])).to_list() * job["rollouts"],
            client=client,
            model=job["model"],
            sampling_args=sampling,
        )["outputs"]
        return [record(output) for output in outputs]

    played = {"train": play(env.get_dataset()), "eval": play(env.get_eval_dataset())}
    Path(out_path).write_text(json.dumps(played))


def record(output):
    return {
        "task_id": output["info"]["task_id"],
        "answer": output["answer"],
        "reply": output["completion"][-1]["content"],
        "truncated": output["is_truncated"],
        "reward": output["reward"],
        "metrics": output["metrics"],
        "error": output["error"] and output["error"]["error_chain_repr"],
    }


main(*sys.argv[1:])
