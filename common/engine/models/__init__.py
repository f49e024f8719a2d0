"""One file per family of architectures; `registry.py` maps architectures to files."""
