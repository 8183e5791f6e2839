"""From a server, tasks or a model to a configuration, and from a configuration to a better one."""
