"""A model divided among ranks. What only one rank knows or writes is here, too."""
