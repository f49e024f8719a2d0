"""Causal attention over the paged cache: torch SDPA everywhere, FlashInfer on CUDA."""
