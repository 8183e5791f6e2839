"""Harness of verifiers v1 that sends one request in its own process, without a sandbox or a program."""

import httpx
import verifiers.v1 as vf


class OneTurnConfig(vf.HarnessConfig):
    pass


class OneTurnHarness(vf.Harness[OneTurnConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=120) as client:
            answer = await client.post("/chat/completions", json=body)
        return vf.ProgramResult(0 if answer.status_code == 200 else 1, "", answer.text)


__all__ = ["OneTurnHarness"]
