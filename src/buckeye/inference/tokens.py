"""The routes between text and token ids; the names are vLLM's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from buckeye.dialects.openai import parse
from buckeye.inference.protocol import DetokenizeRequest, TokenizeRequest
from buckeye.inference.responses import json_response
from buckeye.inference.service import Service


async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of messages as the chat template writes them."""
    service: Service = request.app.state.service
    body = parse(await request.body(), TokenizeRequest)
    service.check_model(body.model)
    ids = _ids(service, body)
    texts = [service.token_text(token) for token in ids] if body.return_token_strs else None
    return json_response(
        {"count": len(ids), "max_model_len": service.max_len, "tokens": ids, "token_strs": texts}
    )


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service: Service = request.app.state.service
    body = parse(await request.body(), DetokenizeRequest)
    service.check_model(body.model)
    service.check_ids(body.tokens)
    return json_response({"prompt": service.renderer.decode(body.tokens)})


def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        return service.encode(body.prompt, special=body.add_special_tokens)
    messages = service.plain_messages(body.messages or [])
    template = service.renderer.template
    return service.renderer.encode(
        template.text(messages, body.tools or [], prompt=body.add_generation_prompt)
    )
