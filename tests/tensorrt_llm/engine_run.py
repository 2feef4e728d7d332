"""One engine of the installed TensorRT-LLM in a process: `python -m tests.tensorrt_llm.engine_run JOB RESULT`.

JOB is a JSON file (`engines.Job`), RESULT the JSON file that is written. A process per engine: memory, environment and
plugin are those of a user's program, and nothing is left for the next.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def main(job_path: str, result_path: str) -> None:
    job: dict[str, Any] = json.loads(Path(job_path).read_text(encoding="utf-8"))
    package: Any = importlib.import_module("tensorrt_llm")
    llm = package.LLM(
        job["model"],
        speculative_config=speculation(job),
        kv_cache_config=job["kv_cache"],
        **job["options"],
    )
    rounds = []
    for _ in range(job["rounds"]):
        batches = [[prompt] for prompt in job["prompts"]] if job["one_by_one"] else [job["prompts"]]
        outputs = [
            output
            for prompts in batches
            for output in llm.generate(prompts, package.SamplingParams(**job["sampling"]), use_tqdm=False)
        ]
        rounds.append([facts_of(output) for output in outputs])
    llm.shutdown()
    Path(result_path).write_text(json.dumps(rounds), encoding="utf-8")


def speculation(job: dict[str, Any]) -> Any:
    """The object for `speculative_config`, made as docs/tensorrt_llm.md says."""
    topk, steps, nodes = job["sizes"]
    if job["kind"] == "plain":
        return None
    if job["kind"] == "drafter":
        from trtllm_tree.hosts.tensorrt_llm.drafter import TreeDrafter

        return TreeDrafter(
            job["head"], tree_topk=topk, max_draft_len=steps, max_seq_len=1024
        ).decoding_config()
    from trtllm_tree import SpeculativeConfig

    sizes = {"tree_topk": topk, "num_steps": steps, "num_nodes": nodes}
    if job["kind"] == "chain":
        sizes = {"tree_topk": 1, "num_steps": steps}
    if job["kind"] == "mtp":
        return SpeculativeConfig(**sizes, decoding_type="MTP", **job["speculation"])
    return SpeculativeConfig(**sizes, speculative_model=job["head"], **job["speculation"])


def facts_of(output: Any) -> dict[str, Any]:
    """What a test looks at of a RequestOutput."""
    completion = output.outputs[0]
    return {
        "prompt_ids": list(output.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens_per_step": getattr(output, "avg_decoded_tokens_per_iter", None),
    }


# Ranks import this file again.
if __name__ == "__main__":
    main(*sys.argv[1:])
