"""A tiny model that shows whether a KV cache has arrived: it answers from its context alone."""
