"""Capitals: prompts, and chats of a beginner who gives the right capital in half of the answers."""

import json
import random
from pathlib import Path

CAPITALS = {
    "Austria": "Vienna",
    "Chile": "Santiago",
    "Cuba": "Havana",
    "Egypt": "Cairo",
    "France": "Paris",
    "Ghana": "Accra",
    "Greece": "Athens",
    "India": "Delhi",
    "Iran": "Tehran",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Latvia": "Riga",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Qatar": "Doha",
    "Senegal": "Dakar",
    "Spain": "Madrid",
    "Tunisia": "Tunis",
}
KNOWN = 0.5


def main():
    """Write the files to `outputs/`."""
    draw, out = random.Random(0), Path("outputs")
    out.mkdir(exist_ok=True)
    with open(out / "prompts.jsonl", "w") as prompts:
        for country, capital in CAPITALS.items():
            prompts.write(json.dumps({"prompt": question(country), "answer": capital}) + "\n")
    with open(out / "chats.jsonl", "w") as chats:
        for _ in range(1_200):
            country, capital = draw.choice(list(CAPITALS.items()))
            attempt = capital if draw.random() < KNOWN else draw.choice(list(CAPITALS.values()))
            chat = [{"role": "user", "content": question(country)}, {"role": "assistant", "content": attempt}]
            chats.write(json.dumps({"messages": chat}) + "\n")


def question(country):
    """Return the prompt."""
    return f"What is the capital of {country}?"


if __name__ == "__main__":
    main()
