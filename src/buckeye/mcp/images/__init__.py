"""Container images without a daemon: fetched from a registry, checked, unpacked."""
