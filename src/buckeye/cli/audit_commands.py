"""The commands of `buckeye` that are offered here, by their words."""

from buckeye.cli.demo import demo
from buckeye.cli.env_check import env_check
from buckeye.cli.evaluate import evaluate
from buckeye.cli.play import play

COMMANDS = {"demo": demo, "env check": env_check, "env play": play, "eval": evaluate}
