"""Private folder of a rollout: its initial files, the start of servers in it, and its removal."""
