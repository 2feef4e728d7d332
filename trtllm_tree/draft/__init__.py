"""Drafters: what proposes the tree. Higher layers than `sampling` are unknown here."""
