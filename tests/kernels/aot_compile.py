"""Compiles every kernel ahead of time for one GPU generation, on a machine without a GPU.

`python aot_compile.py CAPABILITY` prints one JSON line per op: its `_kernel` functions, and what each
instance named by its `aot_specs()` became. Run it with TRITON_INTERPRET=0 in a process of its own, since
Triton decides on interpretation when a kernel is decorated. It must not know any op by name.

A signature type may carry Triton's `:16` suffix: a pointer or integer that is a multiple of 16, as most
are at run time.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

import trtllm_tree.kernels

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MMA = re.compile(r"\b(HMMA|HGMMA|QGMMA|UTCHMMA|UTCQMMA)\b")


def op_names() -> list[str]:
    """Every op folder that has a kernel."""
    folder = Path(trtllm_tree.kernels.__file__).parent
    return sorted(path.parent.name for path in folder.glob("*/triton.py"))


def cuobjdump(cubin: bytes, *flags: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [str(CUOBJDUMP), *flags, file.name], check=True, capture_output=True, text=True
        ).stdout


def compile_spec(
    kernel, signature: dict, constexprs: dict, options: dict, capability: int
) -> dict[str, object]:
    """Compile one instance and read its resource use and MMA instructions off the machine code."""
    types, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        kind, _, multiple = ("constexpr" if name in constexprs else signature[name]).partition(":")
        types[name] = kind
        if multiple:
            attributes[(i,)] = [["tt.divisibility", int(multiple)]]
    # The bytes a thread may spill: of a tile that was measured to be faster although it does.
    options = dict(options)
    spill_bytes = options.pop("spill_bytes", 0)
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_type(kernel, types, constexprs=constexprs, attrs=attributes)
    cubin = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"]
    usage = dict(re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", cuobjdump(cubin, "--dump-resource-usage")))
    return {
        "kernel": kernel.__name__,
        "signature": signature,
        "constexprs": {name: str(value) for name, value in constexprs.items()},
        "options": options,
        "spill_bytes": spill_bytes,
        "usage": {name.lower(): int(count) for name, count in usage.items()},
        "mma": sorted(set(MMA.findall(cuobjdump(cubin, "--dump-sass")))),
    }


def compile_op(name: str, capability: int) -> dict[str, object]:
    """What became of one op; an `error` if any of it failed."""
    report: dict[str, object] = {"op": name, "kernels": [], "instances": []}
    try:
        modules = [importlib.import_module(f"trtllm_tree.kernels.{name}.triton")]
        folder = Path(trtllm_tree.kernels.__file__).parent / name
        if (folder / "mla.py").exists():
            modules.append(importlib.import_module(f"trtllm_tree.kernels.{name}.mla"))
        # Gluon kernels are written for one GPU generation: Hopper.
        if capability == 90 and (folder / "gluon.py").exists():
            modules.append(importlib.import_module(f"trtllm_tree.kernels.{name}.gluon"))
        functions = [f for module in modules for f in vars(module).values()]
        kernels = [f for f in functions if isinstance(f, triton.runtime.JITFunction)]
        report["kernels"] = sorted(f.__name__ for f in kernels if "_kernel" in f.__name__)
        report["instances"] = [
            compile_spec(kernel, signature, constexprs, options, capability)
            for module in modules
            for kernel, signature, constexprs, options in module.aot_specs()
        ]
    # A broken op is reported under its name, and the others are still compiled.
    except Exception:
        report["error"] = traceback.format_exc()
    return report


def problems(report: dict) -> list[str]:
    """Why the op's kernels are not fit for that GPU generation; empty if they are."""
    found = [report["error"]] if "error" in report else []
    compiled = {instance["kernel"] for instance in report["instances"]}
    found += [f"aot_specs() has no instance of {name}" for name in report["kernels"] if name not in compiled]
    if not compiled:
        found.append("no kernel was compiled")
    for instance in report["instances"]:
        spilled = instance["usage"]["stack"] + instance["usage"]["local"]
        if spilled > instance["spill_bytes"]:
            found.append(f"{instance['kernel']} {instance['constexprs']} spills {spilled} bytes a thread")
    return found


if __name__ == "__main__":
    for op in op_names():
        print(json.dumps(compile_op(op, int(sys.argv[1]))), flush=True)
