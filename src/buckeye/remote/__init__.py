"""Training on machines elsewhere: rented pods, or hosts that answer to ssh."""
