"""Parser for the replies of model families that the library `renderers` supports.

The name of a model does not identify its family, because a fine-tuned model may have another template. So the
library is used only if it converts some test conversations to exactly the tokens of the model's template.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buckeye.envs.base import Message, Tool
from buckeye.inference.render.parse_reply import ParsedCall, ParsedMessage, make_call
from buckeye.inference.render.template import (
    PROBE_QUESTION,
    PROBE_TOOL_TURN,
    PROBE_TOOLS,
    ChatTemplate,
    readable,
)

log = logging.getLogger(__name__)

_BY_ARCHITECTURE = {
    "deepseek_v3": ("deepseek-v3", "deepseek-r1"),
    "glm4_moe": ("glm-4.5", "glm-5", "glm-5.1"),
    "gpt_oss": ("gpt-oss",),
    "llama": ("llama-3",),
    "minimax_m2": ("minimax-m2",),
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3", "prime-qwen3"),
}
"""Names in `renderers` of the families to try, by the `model_type` of config.json."""

_CONVERSATIONS = (
    ((PROBE_QUESTION,), ()),
    (({"role": "system", "content": "Be brief."}, *PROBE_TOOL_TURN), PROBE_TOOLS),
    (
        (
            PROBE_QUESTION,
            {"role": "assistant", "content": "It is that."},
            {"role": "user", "content": "Is it?"},
        ),
        (),
    ),
)


class FamilyParser:
    """Parser for the reasoning and calls of one family, by a renderer of the library."""

    def __init__(self, renderer: Any) -> None:
        self.name: str = renderer.config.name
        self._renderer = renderer

    def parse(
        self, sampled_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Tool]
    ) -> ParsedMessage | None:
        """Return the parsed reply.

        Return None if the library fails, or if it finds calls although `tools` is empty.
        """
        try:
            response = self._renderer.parse_response(
                list(sampled_ids), tools=[dict(tool) for tool in tools] or None, prompt_ids=list(prompt_ids)
            )
        except Exception as error:  # no reply of the model may fail the rollout
            log.debug("the %s parser of renderers failed: %r", self.name, error)
            return None
        if response.tool_calls and not tools:
            return None
        calls = tuple(_parsed_call(call) for call in response.tool_calls)
        return ParsedMessage(
            content=response.content or "", reasoning=response.reasoning_content, calls=calls
        )

    def training_turn(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[int], list[int]] | None:
        """Return the token ids of the prompt before the last message, and the token ids of this message.

        The last message must be from the assistant. Its tokens are those that a policy samples, up to and
        including the end of the turn. Return None if the library cannot render the messages, or if the tokens
        of all messages do not start with the prompt.
        """
        whole, offered = [readable(message) for message in messages], [dict(tool) for tool in tools] or None
        try:
            prompt = self._renderer.render_ids(whole[:-1], tools=offered, add_generation_prompt=True)
            rendered = self._renderer.render(whole, tools=offered)
            stops = self._renderer.get_stop_token_ids()
        except Exception as error:  # the caller then uses the chat template, which reports errors clearly
            log.debug("the %s renderer failed: %r", self.name, error)
            return None
        end = max((i + 1 for i, sampled in enumerate(rendered.sampled_mask) if sampled), default=0)
        reply = rendered.token_ids[len(prompt) : end]
        if rendered.token_ids[: len(prompt)] != prompt or not reply:
            return None
        return prompt, reply if reply[-1] in stops else [*reply, stops[0]]


def find_family(tokenizer: Any, model_path: str, template: ChatTemplate) -> FamilyParser | None:
    """Return the parser of the family whose renderer produces the tokens of the template, or None."""
    if not template.supports_tools:
        return None  # all families support tools, so the slow import is not needed
    from renderers import config_from_name, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    renderer_name = MODEL_RENDERER_MAP.get(model_path)
    for name in dict.fromkeys(
        (*([renderer_name] if renderer_name else []), *_BY_ARCHITECTURE.get(_model_type(model_path), ()))
    ):
        try:
            renderer = create_renderer(tokenizer, config_from_name(name))
            if all(_renders_equally(renderer, tokenizer, template, *probe) for probe in _CONVERSATIONS):
                return FamilyParser(renderer)
        except Exception as error:  # a tokenizer without the family's tokens fails in many ways
            log.debug("the renderer %s does not fit: %r", name, error)
    if renderer_name:
        log.warning(
            "The chat template of %s differs from the one that `renderers` has for this model (%s), so tool "
            "calls are parsed as JSON in <tool_call>",
            model_path,
            renderer_name,
        )
    return None


def _renders_equally(
    renderer: Any, tokenizer: Any, template: ChatTemplate, messages: Any, tools: Any
) -> bool:
    text = template.text(messages, tools, prompt=True)
    rendered = renderer.render_ids(list(messages), tools=list(tools) or None, add_generation_prompt=True)
    return rendered == tokenizer.encode(text, add_special_tokens=False)


def _parsed_call(call: Any) -> ParsedCall:
    status = getattr(call.status, "value", call.status)
    if status != "ok" and not call.name:
        return ParsedCall(name="", arguments=call.raw)
    return make_call(call.name, call.arguments, raw=call.raw)


def _model_type(model_path: str) -> str:
    path = Path(model_path) / "config.json"
    return str(json.loads(path.read_text(encoding="utf-8")).get("model_type")) if path.is_file() else ""
