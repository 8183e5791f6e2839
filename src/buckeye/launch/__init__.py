"""From a configuration to processes that are started, watched and ended."""
