"""Agent of the `openai-agents` SDK with a tool: usable as a program, or through the function `play`.

The SDK raises an error for a truncated reply; the agent chooses the reward for it.
"""

import asyncio
import json
import os
from pathlib import Path

from agents import (
    Agent,
    AgentsException,
    OpenAIProvider,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)


async def play(task, endpoint):
    """Return the reward of one task; `endpoint` holds the address of the model."""
    calls = []

    @function_tool
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers."""
        calls.append((a, b))
        return a * b

    agent = Agent(name="calculator", instructions="Use the tool.", tools=[multiply], model="policy")
    provider = OpenAIProvider(base_url=endpoint["base_url"], api_key=endpoint["api_key"])
    try:
        result = await Runner.run(
            agent,
            task["messages"][-1]["content"],
            max_turns=4,
            run_config=RunConfig(model_provider=provider),
        )
        said = str(result.final_output)
    except AgentsException:
        said = ""
    right = said.strip() == str(task["data"]["answer"])
    return {"reward": float(right), "components": {"tool_calls": len(calls)}}


if __name__ == "__main__":
    given = json.loads(Path(os.environ["BUCKEYE_TASK"]).read_text())
    where = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    print(json.dumps(asyncio.run(play(given, where))))
