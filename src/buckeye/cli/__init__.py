"""Parse, call, print. What a program would want to call lies below."""
