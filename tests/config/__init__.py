"""Tests of trtllm_tree.config."""
