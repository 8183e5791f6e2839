"""Python servers whose libraries are imported once: a process is forked for every session."""
