"""Draft trees as data and rules: shape, numbering, the two shifts, lanes, reservation. No model, no cache."""
