"""Implementation of `buckeye env play`: single rollouts by a person, at random, or by a model, shown live."""
