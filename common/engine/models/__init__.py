"""One file per family of architectures; `registry.py` says which serves which."""
