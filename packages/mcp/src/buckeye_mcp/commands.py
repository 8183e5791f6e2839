"""The commands of `buckeye` that are offered here, by their words."""

from buckeye_mcp.gateway.command import gateway
from buckeye_mcp.images.command import env_build, env_push
from buckeye_mcp.tasks.hf_command import hf
from buckeye_mcp.tasks.trust import trust

COMMANDS = {"env build": env_build, "env push": env_push, "env trust": trust, "gateway": gateway, "hf": hf}
