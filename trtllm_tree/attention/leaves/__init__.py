"""Attention leaves: each computes the cascade's prefix partial, or all of it, on one kind of hardware or library."""
