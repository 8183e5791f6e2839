"""Container images without a daemon: downloaded from a registry, verified and unpacked."""
