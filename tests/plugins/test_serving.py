"""The user's way, over the runtime double: the wheel beside TensorRT-LLM, configs/tree_eagle.yaml, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.doubles.tensorrt_llm.install import write_runtime
from tests.plugins.conftest import PROJECT, Environment

# As trtllm-serve builds it: keyword arguments, straight from the file.
SERVE = """
import json, sys
from tensorrt_llm import LLM, SamplingParams
target, options = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(target, **options)
print(type(llm.executor.model).__name__, type(llm.executor.model.spec_worker).__name__)
print(llm.generate([1, 2, 3, 4], SamplingParams(max_tokens=8, temperature=0.0)).outputs[0].token_ids)
"""


class Served(NamedTuple):
    """What a run printed: classes of model and worker, tokens, our lines on stderr, and the last one if it failed."""

    classes: str
    tokens: str
    said: list[str]
    error: str


@pytest.fixture
def serve(
    environment: Environment, tmp_path: Path, tiny_target: Path, tiny_head: Path
) -> Callable[..., Served]:
    """Runs the tiny model with the config file, in the environment with the wheel and a double."""
    options = yaml.safe_load((PROJECT / "configs" / "tree_eagle.yaml").read_text(encoding="utf-8"))
    # The usual layers are those of a model with more of them.
    options["speculative_config"] |= {
        "speculative_model": str(tiny_head),
        "eagle3_layers_to_capture": [0, 1, 2],
    }
    script = tmp_path / "serve.py"
    script.write_text(SERVE, encoding="utf-8")

    def run(layout: str, changes: dict[str, object] | None = None, **variables: str) -> Served:
        write_runtime(tmp_path / "double", layout)
        arguments = [str(script), str(tiny_target), json.dumps(options | (changes or {}))]
        variables |= {"TLLM_DOUBLE_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
        done = environment.call(arguments, tmp_path / "double", check=False, **variables)
        lines = done.stderr.splitlines()
        said = [line for line in lines if line.startswith("[trtllm_tree]")]
        if done.returncode:
            return Served("", "", said, lines[-1])
        return Served(*done.stdout.splitlines()[-2:], said, "")

    return run


def assert_tree(served: Served) -> None:
    assert served.classes == "TreeLlamaForCausalLM TreeEagleWorker", served
    (line,) = served.said
    assert "rank 0: worker TreeEagleWorker, attention TreeCascadeFmha > " in line and "verify gumbel" in line


def test_the_config_file_alone_gives_trees_and_each_rank_says_so(serve: Callable[..., Served]) -> None:
    served = serve("new")
    assert_tree(served)
    # Without speculation, with the same variables: the built-in model under our name, and the same greedy tokens.
    plain = serve("new", {"speculative_config": None})
    assert plain == Served("TreeLlamaForCausalLM NoneType", served.tokens, [], "")


def test_the_same_file_without_the_plugin_does_not_start(serve: Callable[..., Served]) -> None:
    assert_tree(serve("old"))
    refused = serve("old", TLLM_TREE_DISABLE="1")
    assert refused.error.startswith("ValueError") and "trtllm_tree" in refused.error
