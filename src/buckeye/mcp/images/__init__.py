"""Download container images from a registry, verify and unpack them, all without a Docker daemon."""
