"""Acrostics, with the verifiers environment of the package staros-stardata, which someone else has published.

`load_environment` chooses tasks of that environment, and gives its reward function the text of a reply: it
misreads the messages of newer versions of verifiers. `python acrostic.py` writes chats of a beginner to
`outputs/`: five random words; few begin with the right letter.
"""

import json
import random
from pathlib import Path

import verifiers as vf
from stardata.envs import constraint_gym

WORDS = ("Fog", "Frost", "Rain", "Road", "Over", "Old", "Snow", "Sun", "Tree", "Trail")
KNOWN = 0.3


def load_environment():
    """Return the verifiers environment: acrostics of FROST on 30 themes."""
    env = constraint_gym.load_environment(forms=["acrostic"], topics_per_form=30)
    env.rubric = vf.Rubric(funcs=[form])
    return env


def form(completion, info):
    """Return the reward of the package for a reply: 0.2, and 0.8 for the share of right lines."""
    return constraint_gym.prosody_reward(completion[-1]["content"], info=info)


def main():
    """Write the chats."""
    draw, out = random.Random(0), Path("outputs")
    out.mkdir(exist_ok=True)
    rows = constraint_gym.build_dataset(forms=["acrostic"], topics_per_form=30)
    with open(out / "chats.jsonl", "w") as chats:
        for _ in range(2_000):
            right = [[word for word in WORDS if word[0] == letter] for letter in "FROST"]
            lines = [draw.choice(words if draw.random() < KNOWN else WORDS) for words in right]
            chat = [{"role": "user", "content": draw.choice(rows)["prompt"]}]
            chat.append({"role": "assistant", "content": "\n".join(lines)})
            chats.write(json.dumps({"messages": chat}) + "\n")


if __name__ == "__main__":
    main()
