"""Host A: the core over TensorRT-LLM's own extension points. So far only the probe of what it offers."""
