"""Python servers whose libraries are imported once; every session is forked from that process."""
