"""`buckeye demo`: create a small model, warm it up, train it with RL, show what it learned."""
