"""Host B: the core over the embedded chain engine.

Its packages are the extra `embedded`: TensorRT-LLM pins another transformers, and installing beside it must not ask.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from trtllm_tree.errors import HostUnavailableError

_PACKAGES = ("gguf", "jinja2", "tokenizers", "transformers")
# The first whose MTP layers can be loaded alone.
_TRANSFORMERS = (5, 17)


def require_packages() -> None:
    """Say what is not installed before an import fails on it.

    Raises:
        HostUnavailableError: naming all of it, and how to install it.
    """
    lacking = [f"{name} is not installed" for name in _PACKAGES if find_spec(name) is None]
    if find_spec("transformers") is not None:
        found = version("transformers")
        if tuple(int(part) for part in found.split(".")[:2]) < _TRANSFORMERS:
            lacking.append(f"transformers is {found} and must be 5.x, from 5.17 on")
    if lacking:
        raise HostUnavailableError(
            f"host = 'embedded': {', '.join(lacking)}. Install the extra in an environment of its own: "
            "pip install 'trtllm_tree[embedded]'."
        )
