"""Measurements. A number is quoted only with its hardware, shapes, baseline and commit."""
