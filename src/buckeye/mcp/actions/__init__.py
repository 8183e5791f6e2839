"""Tool calls from model replies: the reply parser and the action mappings of a configuration."""
