"""Variables that a gateway's client can set for a server process: only those named at the start."""

from __future__ import annotations

import pytest
from tests.mcp.gateway.client import Client, gateway, scripted

from buckeye.errors import UsageError
from buckeye.mcp.gateway.settings import GatewaySettings, decides_what_runs

pytestmark = pytest.mark.e2e

LOADERS = [
    "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "DYLD_INSERT_LIBRARIES", "GCONV_PATH", "PYTHONPATH",
    "PYTHONSTARTUP", "PYTHONHOME", "PYTHONINSPECT", "NODE_OPTIONS", "NODE_PATH", "PERL5LIB", "PERL5OPT",
    "RUBYOPT", "RUBYLIB", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "CLASSPATH", "BASH_ENV", "ENV", "IFS",
    "PATH", "HOME", "SHELL", "TMPDIR", "GIT_SSH_COMMAND", "GIT_CONFIG_GLOBAL", "PIP_INDEX_URL",
    "UV_INDEX", "NPM_CONFIG_REGISTRY", "DOCKER_HOST", "CONTAINER_HOST", "APPTAINER_BIND", "BUCKEYE_HOME",
    "HOSTALIASES", "XDG_CONFIG_HOME", "HTTPS_PROXY", "REGISTRY_AUTH_FILE", "SSL_CERT_FILE",
]  # fmt: skip


@pytest.mark.parametrize("name", LOADERS)
def test_what_decides_which_code_runs_cannot_be_named(name):
    assert decides_what_runs(name)
    with pytest.raises(UsageError):
        GatewaySettings(variables=frozenset({name}))


def test_what_a_server_reads_itself_can():
    names = {"SEED", "GAME_LEVEL", "ENVIRONMENT", "PATHS", "API_TOKEN", "R2D2", "HOMEPAGE"}
    assert GatewaySettings(variables=frozenset(names)).variables == names


def test_a_client_sets_what_was_named_and_nothing_else(tmp_path):
    with gateway(tmp_path, "--command", scripted()) as running:
        for name in ("LD-PRELOAD", "PYTHONPATH", "Other"):
            client = Client(running.url, **{f"Env-{name}": str(tmp_path / "evil.so")})
            assert ("--variable" in client.error(403)) == (name == "Other")
        environment = Client(running.url, **{"Env-Seed": "3"}).open().call("environment")
        assert environment["SEED"] == "3"
        assert not {"LD_PRELOAD", "PYTHONPATH", "OTHER"} & set(environment)
