"""The commands of `buckeye` that are offered here, by their words."""

from buckeye_audit.checks.command import env_check
from buckeye_audit.demo.command import demo
from buckeye_audit.evaluation.command import evaluate
from buckeye_audit.playing.command import play

COMMANDS = {"demo": demo, "env check": env_check, "env play": play, "eval": evaluate}
