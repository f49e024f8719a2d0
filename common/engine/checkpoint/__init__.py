"""Tensors of a checkpoint: where they lie, how they are made wide, which slices a rank loads."""
