"""Host B: the core over the embedded chain engine."""
