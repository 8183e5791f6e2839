"""`buckeye export`: a run's checkpoint as a model that others can use."""
