"""Settings. This room reads files and flags, and returns one object, or one error with every problem."""
