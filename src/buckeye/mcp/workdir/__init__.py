"""The private folder of a rollout: what is put into it, how servers are started in it, and its end."""
