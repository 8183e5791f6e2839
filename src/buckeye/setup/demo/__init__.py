"""`buckeye demo`: make a small model, warm it up, reinforce it, show what it learned."""
