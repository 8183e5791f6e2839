"""Policies with known replies, and agents that are unaware of training."""

import contextlib
import json

from openai import AsyncOpenAI
from tests.orchestrator.fakes import make_policy

from buckeye.envs.base import DEFAULT_OPTIONS, Reply
from buckeye.inference.client import Generation
from buckeye.workers.proxy import serve

QUESTION = "Which animal jumps?"
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}


letters = make_policy


class ScriptedEngine:
    """Engine that samples scripted texts and records the prompts."""

    def __init__(self, renderer, texts):
        end = renderer.template.end_of_turn[1]
        self.answers = [[*renderer.encode(text), end] for text in texts]
        self.prompts = []

    async def generate(self, prompt_ids, params):
        ids = self.answers[len(self.prompts)]
        self.prompts.append(list(prompt_ids))
        return Generation(
            token_ids=ids, logprobs=[-0.25] * len(ids), versions=[3] * len(ids), finish_reason="stop"
        )


def scripted(renderer, texts):
    """Return a recording policy of a real renderer that samples these texts, and its engine."""
    engine = ScriptedEngine(renderer, texts)
    return make_policy(engine, renderer, seq_len=100_000, seed=0, max_tokens=1000), engine


class Saying:
    """Policy that applies and records options, and replies with its messages in order, repeating the last."""

    def __init__(self, *messages, finish_reason="stop"):
        self.messages = messages
        self.finish_reason = finish_reason
        self.asked = []

    async def chat(self, messages, *, tools=()):
        return await self.ask(messages, tools=tools)

    async def ask(self, messages, *, tools=(), options=DEFAULT_OPTIONS):
        message = self.messages[min(len(self.asked), len(self.messages) - 1)]
        self.asked.append((messages, tools, options))
        text = message.get("content") or ""
        return Reply(text=text, finish_reason=self.finish_reason, message=message, completion_tokens=4)


def openai_of(endpoint):
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


def anthropic_of(endpoint):
    from anthropic import AsyncAnthropic  # importing it takes seconds

    return AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key, max_retries=0)


@contextlib.asynccontextmanager
async def openai(policy, **options):
    """Yield an OpenAI client of a policy, and the endpoint."""
    async with serve(policy, **options) as endpoint, openai_of(endpoint) as client:
        yield client, endpoint


@contextlib.asynccontextmanager
async def anthropic(policy, **options):
    """Yield an Anthropic client of a policy, and the endpoint."""
    async with serve(policy, **options) as endpoint, anthropic_of(endpoint) as client:
        yield client, endpoint


# Agents: they send requests, run `find` until it is no longer called, and return the last text.


async def chat_agent(endpoint, *, stream=False):
    tool = {"type": "function", "function": {"name": "find", "description": "Look.", "parameters": SCHEMA}}
    messages = [{"role": "user", "content": QUESTION}]
    async with openai_of(endpoint) as client:
        while True:
            ask = {"model": "gpt-x", "messages": messages, "tools": [tool]}
            if stream:
                async with client.chat.completions.stream(**ask) as events:
                    async for _ in events:
                        pass
                    message = (await events.get_final_completion()).choices[0].message
                message = message.model_dump(exclude={"parsed"}, exclude_none=True)
                for call in message.get("tool_calls") or ():
                    call["function"].pop("parsed_arguments", None)
            else:
                message = (await client.chat.completions.create(**ask)).choices[0].message.model_dump()
            messages.append(message)
            if not message.get("tool_calls"):
                return message["content"]
            for call in message["tool_calls"]:
                found = find(json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})


async def responses_agent(endpoint, *, stream=False, remembers=False):
    tool = {"type": "function", "name": "find", "description": "Look.", "parameters": SCHEMA, "strict": None}
    history = [{"role": "user", "content": QUESTION}]
    new, previous = history, None
    async with openai_of(endpoint) as client:
        while True:
            ask = {"model": "gpt-x", "tools": [tool], "instructions": "Be brief."}
            ask |= {"input": new, "previous_response_id": previous} if remembers else {"input": history}
            if stream:
                async with client.responses.stream(**ask) as events:
                    async for _ in events:
                        pass
                    response = await events.get_final_response()
            else:
                response = await client.responses.create(**ask)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            new = [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": find(json.loads(call.arguments)),
                }
                for call in calls
            ]
            exclude = {"parsed_arguments"}
            said = [item.model_dump(exclude_none=True, exclude=exclude) for item in response.output]
            history += [*said, *new]
            previous = response.id


async def anthropic_agent(endpoint, *, stream=False):
    tool = {"name": "find", "description": "Look.", "input_schema": SCHEMA}
    messages = [{"role": "user", "content": QUESTION}]
    async with anthropic_of(endpoint) as client:
        while True:
            ask = {"model": "claude-x", "max_tokens": 500, "messages": messages, "tools": [tool]}
            ask["system"] = "Be brief."
            if stream:
                async with client.messages.stream(**ask) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**ask)
            messages.append({"role": "assistant", "content": message.content})
            if message.stop_reason != "tool_use":
                return "".join(block.text for block in message.content if block.type == "text")
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": find(block.input)}
                for block in message.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})


def find(arguments):
    return f"{arguments['word']} was found"
