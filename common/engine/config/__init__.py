"""Readers of config.json that the families of models share, and `ModelConfig`."""
