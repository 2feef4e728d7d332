"""For `trtllm-serve --custom_module_dirs plugins/trtllm_tree_plugin`: registers the plugin when it is imported.

The explicit way to what the start-up hook does by itself, for environments whose .pth files Python does not read
(`pip install --target`, PYTHONPATH). The package trtllm_tree must be importable on every node. Unlike the hook, this
raises whatever keeps the plugin from being registered, whether trees are on or off.
"""

from trtllm_tree.hosts.tensorrt_llm.plugin import register

register(required=True)
