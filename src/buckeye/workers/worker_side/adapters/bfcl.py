"""Adapter for the single-turn categories of the Berkeley Function-Calling Leaderboard (`bfcl-eval`).

A task is a question with functions as native tools. The library decodes and checks the calls of the reply.
The argument `limit` is the maximum number of tasks.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from .base import Adapter, AdapterError, Json, check_arguments, raised, scored, suggest_name
from .model import ModelError, chat

PREFIX = "bfcl-eval/"
_MODEL = "openbmb/MiniCPM-SALA-FC"
"""Model of the library with OpenAI's native calls, whose names have "_" in place of "."."""
_NEEDS = {
    "multi_turn": "evaluates texts of the model as Python code",
    "memory": "needs an embedding model and keeps state between tasks",
    "web_search": "needs a network and the key SERPAPI_API_KEY",
    "format_sensitivity": "has no native calls",
}


class BFCL(Adapter):
    """One category. Its only split is `train`."""

    def __init__(self, env_id: str, args: Json) -> None:
        check_arguments(env_id, args, ("limit",))
        self._category = env_id.removeprefix(PREFIX)
        for prefix, need in _NEEDS.items():
            if self._category.startswith(prefix):
                raise AdapterError(f"{env_id} is not supported: the category {need}")
        known = _module("constants.category_mapping").SINGLE_TURN_CATEGORY
        if self._category not in known:
            raise AdapterError(
                f"bfcl-eval has no category {self._category!r}.{suggest_name(self._category, known)} "
                f"Categories: {', '.join(known)}"
            )
        data = _module("utils")
        self._is_relevance = data.is_relevance_or_irrelevance(self._category)
        self._prompts, self._entries = (  # the checker needs the types before they become texts
            data.load_dataset_entry(self._category, include_language_specific_hint=hint)[: args.get("limit")]
            for hint in (True, False)
        )
        self._answers = [] if self._is_relevance else data.load_ground_truth_entry(self._category)
        self._runner = _module("eval_checker.eval_runner")
        handler = _module("model_handler.api_inference.openai_completion").OpenAICompletionsHandler
        decode = functools.partial(handler.decode_ast, SimpleNamespace(is_fc_model=True))
        self._decoder = SimpleNamespace(decode_ast=decode)

    def info(self) -> Json:
        return {"name": f"{PREFIX}{self._category}", "splits": ["train"]}

    def tasks(self, split: str) -> Iterator[Json]:
        entries = {"train": self._prompts}[split]
        return (
            {"id": entry["id"], "messages": entry["question"][0], "data": {"index": index}}
            for index, entry in enumerate(entries)
        )

    async def rollout(self, task: Json, endpoint: Json, context: Json) -> Json:
        entry = self._prompts[task["data"]["index"]]
        tools = _module("model_handler.utils").convert_to_tool(
            entry["function"],
            _module("constants.type_mappings").GORILLA_TO_OPENAPI,
            _module("constants.enums").ModelStyle.OPENAI_COMPLETIONS,
        )
        try:
            reply = await chat(endpoint, entry["question"][0], tools=tools)
        except ModelError as error:
            return raised("model", error)
        calls = [call["function"] for call in reply.message.get("tool_calls") or ()]
        try:
            checked = self._check(
                task["data"]["index"],
                [{call["name"]: call["arguments"]} for call in calls] or reply.text,
            )
        except Exception as error:
            return raised("score", error)
        return scored(
            float(checked["valid"]),
            components={"calls": len(calls)},
            stop_reason="truncated" if reply.truncated else "done",
        )

    def _check(self, index: int, result: Any) -> Any:
        """Return the library's verdict about the calls of a reply, or about its text."""
        entry = copy.deepcopy(self._entries[index])
        if self._is_relevance:
            return self._runner._evaluate_single_relevance_entry(
                self._decoder, entry["id"], result, entry, _MODEL, self._category
            )
        enums, kind = _module("constants.enums"), self._category.rpartition("_")[2].upper()
        language = kind if kind in ("JAVA", "JAVASCRIPT") else "PYTHON"
        return self._runner._evaluate_single_ast_entry(
            self._decoder,
            entry["id"],
            result,
            self._answers[index]["ground_truth"],
            entry,
            _MODEL,
            self._category,
            enums.Language[language],
            enums.ReturnFormat[language],
        )


def _module(name: str) -> Any:
    """Return a module of the library."""
    return importlib.import_module(f"bfcl_eval.{name}")
