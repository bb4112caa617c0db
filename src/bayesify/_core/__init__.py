"""Plumbing that all folders use: trees of tensors, files, maths, modes."""

__all__: list[str] = []
