"""Scores of transcripts by verifiers v0: `python v0.py FOLDER MODULE < JOB`.

JOB is a JSON list of `{"args", "split", "row", "said"}`. The output is a list of rewards, metrics, errors,
and the requests to the model.
"""

import contextlib
import json
import os
import sys


def main(folder, module):
    sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), folder]
    import verifiers as vf
    from replay import Replay

    replay = Replay()
    client = vf.ClientConfig(
        client_type="openai_chat_completions", api_base_url=replay.url, api_key_var="NO_KEY"
    )
    scores = []
    for rollout in json.load(sys.stdin):
        with contextlib.redirect_stdout(sys.stderr):
            env = vf.load_environment(module, **rollout["args"])
            dataset = env.get_dataset() if rollout["split"] == "train" else env.get_eval_dataset()
            replay.play(rollout["said"])
            rows = dataset.select([rollout["row"]]).to_list()
            (output,) = env.generate_sync(rows, client=client, model="replay")["outputs"]
        scores.append(
            {
                "reward": output["reward"],
                "metrics": output["metrics"],
                "asked": replay.asked,
                "error": str(output.get("error") or ""),
            }
        )
    print(json.dumps(scores))


os.environ["NO_KEY"] = "none"
main(*sys.argv[1:])
