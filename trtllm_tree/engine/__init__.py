"""A small single-device runtime for transformers models: paged KV, continuous batching, chunked prefill.

It plays TensorRT-LLM's part where TensorRT-LLM is absent, and it knows chains only: what speculation does
inside a decode step is behind `engine.ports.DecodeHook`.
"""
