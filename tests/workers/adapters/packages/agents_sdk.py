"""An agent of the `openai-agents` SDK with a tool: a program, or the function `play`.

The SDK raises for a reply that was cut off; the agent says what that is worth.
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
    """The reward of one task; `endpoint` says where the model is."""
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
