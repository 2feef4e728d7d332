"""Attention leaves: each computes the prefix partial of the cascade on one kind of hardware or library."""
