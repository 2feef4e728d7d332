"""The runtime contract double: behaviour on real tensors behind TensorRT-LLM's names.

Copied next to the double's package by `install`, with a `layout.py` that says which layout is spoken. Knows nothing of
trtllm_tree. Our own code, written from facts about names, parameters, shapes and the order of calls.
"""
