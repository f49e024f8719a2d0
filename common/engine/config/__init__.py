"""What config.json says: typed readings that the families of models share, and `ModelConfig`."""
