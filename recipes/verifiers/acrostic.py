"""Acrostics, with the verifiers environment of the package staros-stardata, which someone else has published.

`load_environment` chooses the tasks of that environment. `python acrostic.py` writes chats of a beginner to
`outputs/`: five random words; few begin with the right letter.
"""

import json
import random
from pathlib import Path

from stardata.envs import constraint_gym

WORDS = ("Fog", "Frost", "Rain", "Road", "Over", "Old", "Snow", "Sun", "Tree", "Trail")
KNOWN = 0.3


def load_environment():
    """Return the verifiers environment: acrostics of FROST on 30 themes."""
    return constraint_gym.load_environment(forms=["acrostic"], topics_per_form=30)


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
