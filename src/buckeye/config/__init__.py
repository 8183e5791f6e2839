"""Settings: files and flags become one object, or one error with every problem. Nothing is started."""
