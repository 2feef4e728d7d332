"""Tree attention: one cascade over any leaf, and the compaction of its KV rows."""
