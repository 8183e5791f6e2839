"""Training on other machines: rented pods, or hosts of the user over ssh."""
