"""One rollout with the tools of v0: `python play_v0_tools.py JOB.json OUT.json`."""

import json
import sys
from pathlib import Path

import verifiers as vf


def main(job_path, out_path):
    job = json.loads(Path(job_path).read_text())
    env = vf.load_environment("harleycooper/dakota1890", tools=True, **job["args"])
    client = vf.ClientConfig(
        client_type="openai_chat_completions", api_base_url=job["base_url"], api_key_var="ENGINE_KEY"
    )
    rows = env.get_dataset().select(range(1)).to_list()
    (output,) = env.generate_sync(rows, client=client, model="scripted")["outputs"]
    played = {name: output[name] for name in ("prompt", "completion", "reward", "metrics", "error")}
    Path(out_path).write_text(json.dumps(played, default=lambda message: message.model_dump()))


main(*sys.argv[1:])
