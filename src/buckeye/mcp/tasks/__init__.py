"""Read and check tasks in files and datasets, and replace the variables in them."""
