"""The memory of a rank's cache: element types, views, states, digests. Knows nothing of peers."""
