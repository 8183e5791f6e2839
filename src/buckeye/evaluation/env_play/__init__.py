"""Implementation of `buckeye env play`: rollouts of a person, of random actions, or of a model."""
