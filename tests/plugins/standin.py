"""A `tensorrt_llm` with a working model registry and one model, and nothing else: for what the start-up hook meets.

"eager" imports all its models with itself, "lazy" almost nothing. Both check, where a model is registered from outside,
that no module of theirs is half imported: whoever registers too early fails. Written from what was read, not copied.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

LAYOUTS = ("eager", "lazy")

_REGISTRY = """
import importlib
import sys
import tensorrt_llm
MODEL_CLASS_MAPPING = {}
def register_auto_model(name):
    def decorator(cls):
        if not cls.__module__.startswith("tensorrt_llm."):
            half = [n for n, m in sys.modules.items()
                    if n.partition(".")[0] == "tensorrt_llm" and getattr(m.__spec__, "_initializing", False)]
            # The module that is being executed by the import that woke the hook has run all its code.
            assert all(sys.modules[n].__dict__.get("DONE") for n in half), half
        registered.append((name, cls))
        if name not in MODEL_CLASS_MAPPING or not is_built_in(cls.__module__):
            MODEL_CLASS_MAPPING[name] = cls
        return cls
    return decorator
# How the newest versions tell a rank which modules hold the models from outside; a rank forgets all others.
registered, declared = [], {}
def is_built_in(module):
    return module.startswith("tensorrt_llm.")
def export_external_model_modules():
    return {name: cls.__module__ for name, cls in MODEL_CLASS_MAPPING.items() if not is_built_in(cls.__module__)}
def register_external_model_modules(modules):
    declared.update(modules)
    MODEL_CLASS_MAPPING.clear()
    for name, cls in registered:
        if declared.get(name, cls.__module__) == cls.__module__ and (is_built_in(cls.__module__) or name in declared):
            MODEL_CLASS_MAPPING[name] = cls
def get_registered_model_class(name):
    if name not in MODEL_CLASS_MAPPING:
        importlib.import_module(declared.get(name, "tensorrt_llm._torch.models.modeling_llama"))
    return MODEL_CLASS_MAPPING[name]
DONE = True
"""

_FILES = {
    "__init__.py": """
        import os
        if os.environ.pop("STANDIN_FAILS_ONCE", None):
            raise ImportError("once")
        {eager}
        DONE = True
        """,
    "data.txt": "a resource",
    "_torch/__init__.py": "DONE = True",
    "_torch/models/__init__.py": """
        from tensorrt_llm._torch.models import modeling_utils
        {eager_models}
        DONE = True
        """,
    "_torch/models/modeling_utils.py": _REGISTRY,
    "_torch/models/modeling_llama.py": """
        from tensorrt_llm._torch.models.modeling_utils import register_auto_model
        from tensorrt_llm._torch.models.modeling_speculative import SpecDecOneEngineForCausalLM
        @register_auto_model("LlamaForCausalLM")
        class LlamaForCausalLM(SpecDecOneEngineForCausalLM):
            def __init__(self, model_config):
                super().__init__(model_config)
        DONE = True
        """,
    "_torch/models/modeling_speculative.py": """
        class SpecDecOneEngineForCausalLM:
            def __init__(self, model_config):
                self.model_config, self.spec_worker = model_config, "built in"
        DONE = True
        """,
    # An import that reaches the registry from outside the package of models, as the executor's does.
    "llmapi/__init__.py": """
        import tensorrt_llm._torch.models.modeling_utils
        from tensorrt_llm.llmapi import llm
        DONE = True
        """,
    "llmapi/llm.py": "DONE = True",
    "commands/__init__.py": "DONE = True",
    "commands/tool.py": """
        import tensorrt_llm._torch.models.modeling_llama
        from tensorrt_llm._torch.models.modeling_utils import MODEL_CLASS_MAPPING
        print(MODEL_CLASS_MAPPING["LlamaForCausalLM"].__module__)
        """,
}


def write_torch(root: Path) -> None:
    """Write a `torch` without anything: the real one costs seconds a process, and registration needs nothing of it."""
    (root / "torch.py").write_text("", encoding="utf-8")


def write_standin(root: Path, layout: str) -> None:
    """Write the package into `root`."""
    parts = {
        "eager": "import tensorrt_llm._torch.models" if layout == "eager" else "",
        "eager_models": "import tensorrt_llm._torch.models.modeling_llama" if layout == "eager" else "",
    }
    for name, text in _FILES.items():
        path = root / "tensorrt_llm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        body = textwrap.dedent(text)
        path.write_text(body if text is _REGISTRY else body.format(**parts), encoding="utf-8")
