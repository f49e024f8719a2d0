"""Computes tokens on one rank: checkpoint, cache, forward pass, draw. The only home of torch."""
