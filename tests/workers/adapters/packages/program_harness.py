"""Harness of verifiers v1 that runs a separate program, which sends one request."""

import json
import sys

import verifiers.v1 as vf

PROGRAM = """
import json, os, sys, urllib.request
body = {"model": "any", "messages": json.loads(sys.argv[1])}
headers = {"Authorization": "Bearer " + os.environ["SECRET"], "Content-Type": "application/json"}
urllib.request.urlopen(
    urllib.request.Request(os.environ["ENDPOINT"] + "/chat/completions", json.dumps(body).encode(), headers)
).read()
"""


class ProgramConfig(vf.HarnessConfig):
    pass


class ProgramHarness(vf.Harness[ProgramConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        environ = {"ENDPOINT": endpoint, "SECRET": secret}
        return await runtime.run([sys.executable, "-c", PROGRAM, json.dumps(messages)], environ)


__all__ = ["ProgramHarness"]
