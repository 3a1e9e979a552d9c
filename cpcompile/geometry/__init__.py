"""Visibility of keys and layouts of tokens, as integers without tensors of a model."""
