"""From a model's words to calls of tools: the parser of replies, and the mappings of a configuration."""
