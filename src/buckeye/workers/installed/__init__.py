"""Environments that `buckeye env install` has installed, each with its own interpreter."""

from buckeye.workers.installed.record import InstalledEnvironment
from buckeye.workers.installed.store import all_installed, find_installed, get_installed

__all__ = ["InstalledEnvironment", "all_installed", "find_installed", "get_installed"]
