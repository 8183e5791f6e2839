"""Create the private folder of a rollout, fill it with files, start servers in it, and remove it."""
