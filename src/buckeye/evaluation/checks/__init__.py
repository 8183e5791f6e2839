"""What an environment's rewards are worth: replies without content, probes, and checks of the tasks."""
