"""`buckeye eval`: any environment with any model that speaks the OpenAI chat API."""
