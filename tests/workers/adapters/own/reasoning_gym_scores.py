"""What reasoning-gym makes of replies: `python reasoning_gym_scores.py DATASET SETTINGS < JOB`, a JSON
list of `{"index", "text"}`."""

import json
import sys

import reasoning_gym
from reasoning_gym.utils import extract_answer

dataset = reasoning_gym.create_dataset(sys.argv[1], **json.loads(sys.argv[2]))
print(
    json.dumps(
        [
            dataset.score_answer(extract_answer(reply["text"]), dataset[reply["index"]])
            for reply in json.load(sys.stdin)
        ]
    )
)
