"""A tiny model that shows whether a KV cache arrived: it answers from its context alone."""
