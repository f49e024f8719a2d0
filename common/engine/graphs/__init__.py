"""Decode passes that are recorded once and replayed. Knows nothing of requests."""
