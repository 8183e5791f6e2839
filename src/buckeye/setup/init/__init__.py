"""`buckeye rl init`: write the configuration of an environment from the tools that its server announces."""
