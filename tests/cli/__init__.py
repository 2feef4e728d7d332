"""Tests of the command trtllm-tree."""
