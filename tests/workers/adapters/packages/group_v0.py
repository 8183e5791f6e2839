"""Classic environment of verifiers that combines two others: one with a tool, one with several turns."""

import guess_v0
import tool_v0
import verifiers as vf


def load_environment():
    return vf.EnvGroup(
        envs=[tool_v0.load_environment(), guess_v0.load_environment()], env_names=["tool", "guess"]
    )
