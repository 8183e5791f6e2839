"""The command line: parse, call, print. Logic that a program would call is in the rooms below."""
