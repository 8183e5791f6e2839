"""What the interpreter of an environment loads too, by path: Python 3.10 and the standard library must do,
and nothing of Buckeye is imported here."""
