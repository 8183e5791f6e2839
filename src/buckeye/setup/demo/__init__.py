"""`buckeye demo`: create a small model, warm-start it, train it with RL, show that it improved."""
