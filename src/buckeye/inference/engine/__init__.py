"""The embedded engine: weights, cache, decoding, sampling. It knows neither HTTP nor messages."""
