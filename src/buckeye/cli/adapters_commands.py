"""The commands of `buckeye` that are offered here, by their words."""

from buckeye.cli.env_installed import env_info, env_install, env_list, env_remove, env_shell
from buckeye.cli.workers import workers

COMMANDS = {
    "env info": env_info,
    "env install": env_install,
    "env list": env_list,
    "env remove": env_remove,
    "env shell": env_shell,
    "workers": workers,
}
