"""Sampling backends: they choose each node's target token and own the accepted path."""
