"""The API of Prime Intellect, which rents machines."""
