"""Dakota grammar as verifiable tasks, generated from the 19th-century record."""

from dakota1890.environment import DakotaEnvironment, load_environment

__all__ = ["DakotaEnvironment", "load_environment"]
__version__ = "0.1.20"
