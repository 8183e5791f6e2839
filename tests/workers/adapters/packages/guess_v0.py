"""Classic environment of verifiers with several turns, in which a number is guessed."""

import verifiers as vf
from datasets import Dataset


class GuessEnv(vf.MultiTurnEnv):
    async def setup_state(self, state):
        if state["info"].get("setup_fails"):
            raise vf.InfraError("no place to play")

    async def env_response(self, messages, state, **kwargs):
        guess = str(messages[-1].content).strip()
        if guess == "raise":
            raise RuntimeError("the game fell over")
        if guess == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        hint = "higher" if guess.isdigit() and int(guess) < int(state["answer"]) else "lower"
        return [{"role": "user", "content": hint}]


def found(completion, answer, state):
    return 1.0 / len(state["trajectory"]) if completion[-1].content == "right" else 0.0


def load_environment(setup_fails: bool = False):
    rows = [
        {"question": "Guess a number up to 9.", "answer": answer, "info": {"setup_fails": setup_fails}}
        for answer in ("7", "3")
    ]
    return GuessEnv(max_turns=4, dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[found]))
