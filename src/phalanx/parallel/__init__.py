"""Tensor parallelism of existing modules: a model is cut in place, by rules, over a group of ranks."""
