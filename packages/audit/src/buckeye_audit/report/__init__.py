"""`buckeye env report`: what training did to an environment's held-out tasks, with intervals, beside what a
policy without content scores."""
