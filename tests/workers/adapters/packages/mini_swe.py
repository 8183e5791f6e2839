"""Function that lets mini-swe-agent, unchanged and with its default prompts, write an answer to a file."""

import os
import tempfile
from pathlib import Path

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

CONFIG = yaml.safe_load((builtin_config_dir / "default.yaml").read_text())


def play(task, endpoint):
    """Return half of the reward for the answer, and half for the end of the work within three commands."""
    server = {"api_base": endpoint["base_url"], "api_key": endpoint["api_key"]}
    model = LitellmTextbasedModel(
        model_name="openai/policy",
        model_kwargs={"drop_params": True, **server},
        cost_tracking="ignore_errors",
        **{key: value for key, value in CONFIG.get("model", {}).items() if key.endswith("template")},
    )
    with tempfile.TemporaryDirectory() as folder:
        agent = DefaultAgent(model, LocalEnvironment(cwd=folder), **CONFIG["agent"] | {"step_limit": 3})
        ended = agent.run(task["messages"][-1]["content"])
        file = Path(folder, "answer.txt")
        right = file.exists() and file.read_text().strip() == str(task["data"]["answer"])
    submitted = ended["exit_status"] == "Submitted"
    return {"reward": 0.5 * right + 0.5 * submitted, "components": {"calls": agent.n_calls}}
