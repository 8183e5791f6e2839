"""Rewards of replies by the environment of an OpenEnv server: `openenv_scores.py FOLDER APP FIELD < JOB`.

JOB is a JSON list of `{"options", "said"}`. FIELD is the field of an action that a reply fills; with `None`,
a reply is the JSON of an action. The environments are called directly, without the server.
"""

import importlib
import json
import sys

from pydantic import ValidationError

folder, app, field = sys.argv[1:]
sys.path.insert(0, folder)


def classes():
    module = importlib.import_module(app.partition(":")[0])
    if "EchoEnvironment" in vars(module):
        return module.EchoEnvironment, module.EchoAction
    return {"count": (module.Count, module.Text), "sums": (module.Sums, module.Pair)}[app.partition(":")[2]]


def play(options, said):
    make, action = classes()
    environment, rewards = make(), []
    environment.reset(**options)
    for text in said:
        try:
            given = {field: text} if field != "None" else json.loads(text)
            rewards.append(environment.step(action.model_validate(given)).reward)
        except (ValueError, ValidationError):
            rewards.append(None)
    return rewards


print(json.dumps([play(**episode) for episode in json.load(sys.stdin)]))
