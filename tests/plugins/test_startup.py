"""The start-up hook, from the wheel, in a fresh environment: when it registers, where, and that it leaves no trace."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugins.conftest import PROJECT, Environment, build
from tests.plugins.standin import LAYOUTS, write_standin, write_torch

layouts = pytest.mark.parametrize("layout", LAYOUTS)
HOOK = "import trtllm_tree_startup; trtllm_tree_startup.install()"
# What the registry holds, or None before it is loaded; and whether the hook still waits.
SEEN = """
import sys
def seen():
    registry = sys.modules.get("tensorrt_llm._torch.models.modeling_utils")
    found = registry and registry.MODEL_CLASS_MAPPING.get("LlamaForCausalLM")
    waits = any(type(finder).__module__ == "trtllm_tree_startup" for finder in sys.meta_path)
    return f"{getattr(found, '__name__', None)} {waits}"
"""


@pytest.fixture
def standin(tmp_path: Path) -> Callable[[str], Path]:
    """Writes the stand-in package in a layout; returns where."""

    def write(layout: str) -> Path:
        write_torch(tmp_path)
        write_standin(tmp_path, layout)
        return tmp_path

    return write


def test_the_wheel_puts_the_hook_and_nothing_else_of_plugins_beside_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        beside = {name for name in archive.namelist() if not name.startswith("trtllm_tree/")}
        assert {name for name in beside if ".dist-info/" not in name} == {
            "trtllm_tree.pth",
            "trtllm_tree_startup.py",
        }
        assert archive.read("trtllm_tree.pth").decode().strip() == HOOK
        assert "trtllm_tree/hosts/tensorrt_llm/plugin.py" in archive.namelist()


def test_an_editable_install_has_the_hook_too(tmp_path: Path) -> None:
    with zipfile.ZipFile(build("build_editable", tmp_path)) as archive:
        assert archive.read("trtllm_tree.pth").decode().strip() == HOOK
        startup = (PROJECT / "plugins" / "trtllm_tree_startup.py").read_bytes()
        assert archive.read("trtllm_tree_startup.py") == startup


def test_the_hook_loads_nothing_but_itself() -> None:
    code = """
import os, sys
before = set(sys.modules)
import trtllm_tree_startup
trtllm_tree_startup.install()
print(*sorted(set(sys.modules) - before))
"""
    # Without site: it loads modules that ours must not count on.
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(PROJECT / "plugins")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "__future__ trtllm_tree_startup\n"


def test_without_tensorrt_llm_nothing_of_ours_is_loaded_and_its_absence_is_the_usual_error(
    environment: Environment,
) -> None:
    code = f"""
import importlib.util, sys
# A machine with the real one runs this test too.
sys.path.remove({sysconfig.get_path("purelib")!r})
assert importlib.util.find_spec("tensorrt_llm") is None
try:
    import tensorrt_llm
except ModuleNotFoundError as error:
    print(error.name, error)
print([name for name in sys.modules if name.partition(".")[0] in ("torch", "trtllm_tree", "trtllm_tree_startup")])
"""
    done = environment.run(code)
    assert done.stdout.splitlines() == [
        "tensorrt_llm No module named 'tensorrt_llm'",
        "['trtllm_tree_startup']",
    ]
    assert done.stderr == ""


@layouts
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_parent_and_child_both_see_the_plugin(
    environment: Environment, standin: Callable[[str], Path], layout: str, method: str
) -> None:
    code = f"""
import multiprocessing
{SEEN}
def child(queue):
    import tensorrt_llm.llmapi
    queue.put(seen())
if __name__ == "__main__":
    if {method == "spawn"}:
        import tensorrt_llm.llmapi
        print(seen())
    context = multiprocessing.get_context({method!r})
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=120))
    process.join()
"""
    done = environment.run(code, standin(layout))
    assert set(done.stdout.splitlines()) == {"TreeLlamaForCausalLM False"} and done.stderr == ""


def test_it_waits_until_the_outermost_import_that_loads_the_registry_has_ended(
    environment: Environment, standin: Callable[[str], Path]
) -> None:
    code = f"""
{SEEN}
import tensorrt_llm
print(seen())
import tensorrt_llm.commands
print(seen())
import tensorrt_llm.llmapi
print(seen())
import tensorrt_llm._torch.models.modeling_llama
print(seen())
"""
    ours = ["TreeLlamaForCausalLM False"] * 2
    assert environment.run(code, standin("lazy")).stdout.splitlines() == ["None True", "None True", *ours]
    # With trees on there is no reason to wait; in the other layout all is there at once.
    early = environment.run(code, standin("lazy"), TLLM_TREE_ENABLE="1")
    assert early.stdout.splitlines() == ["TreeLlamaForCausalLM False"] * 4
    assert environment.run(code, standin("eager")).stdout.splitlines() == ["TreeLlamaForCausalLM False"] * 4


@layouts
def test_our_models_win_where_the_built_in_one_was_imported_by_the_same_import(
    environment: Environment, standin: Callable[[str], Path], layout: str
) -> None:
    code = f"{SEEN}\nimport tensorrt_llm._torch.models.modeling_llama\nprint(seen())"
    assert environment.run(code, standin(layout)).stdout == "TreeLlamaForCausalLM False\n"


@layouts
def test_a_rank_that_unpickles_our_class_before_anything_else_gets_it(
    environment: Environment, standin: Callable[[str], Path], layout: str
) -> None:
    code = f"""
{SEEN}
import pickle
cls = pickle.loads(b"ctrtllm_tree.hosts.tensorrt_llm.models\\nTreeLlamaForCausalLM\\n.")
print(cls.__name__, seen())
"""
    done = environment.run(code, standin(layout))
    assert done.stdout.startswith("TreeLlamaForCausalLM TreeLlamaForCausalLM"), done.stderr


@layouts
@pytest.mark.parametrize("hooked", [True, False])
def test_a_rank_that_is_told_the_module_of_our_classes_gets_them(
    environment: Environment, standin: Callable[[str], Path], layout: str, hooked: bool
) -> None:
    code = f"""
import multiprocessing, sys
def rank(declared, queue):
    if not {hooked}:
        # As on a node whose Python does not read .pth files.
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "trtllm_tree_startup"]
    from tensorrt_llm._torch.models import modeling_utils
    modeling_utils.register_external_model_modules(declared)
    queue.put(modeling_utils.get_registered_model_class("LlamaForCausalLM").__name__)
if __name__ == "__main__":
    from tensorrt_llm._torch.models.modeling_utils import export_external_model_modules
    declared = export_external_model_modules()
    print(declared["LlamaForCausalLM"])
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=rank, args=(declared, queue))
    process.start()
    print(queue.get(timeout=120))
    process.join()
"""
    done = environment.run(code, standin(layout))
    assert done.stdout.splitlines() == ["trtllm_tree.hosts.tensorrt_llm.models", "TreeLlamaForCausalLM"]


def test_a_module_that_is_run_as_a_program_gets_the_plugin(
    environment: Environment, standin: Callable[[str], Path]
) -> None:
    done = environment.call(["-m", "tensorrt_llm.commands.tool"], standin("lazy"))
    assert done.stdout == "trtllm_tree.hosts.tensorrt_llm.models\n"


@layouts
def test_switched_off_it_registers_nothing(
    environment: Environment, standin: Callable[[str], Path], layout: str
) -> None:
    code = f"""
{SEEN}
import tensorrt_llm._torch.models.modeling_llama
print(seen(), "trtllm_tree" in sys.modules)
from trtllm_tree.hosts.tensorrt_llm.plugin import register
register(required=True)
print(seen())
"""
    done = environment.run(code, standin(layout), TLLM_TREE_DISABLE="1", TLLM_TREE_ENABLE="1")
    assert done.stdout.splitlines() == ["LlamaForCausalLM False False", "LlamaForCausalLM False"]
    # Set by the program itself, after Python had started.
    late = f"import os\nos.environ['TLLM_TREE_DISABLE'] = '1'\n{code}"
    assert environment.run(late, standin(layout)).stdout.splitlines()[0].startswith("LlamaForCausalLM")


@layouts
def test_the_package_cannot_tell_that_it_was_watched(
    environment: Environment, standin: Callable[[str], Path], layout: str
) -> None:
    code = f"""
{SEEN}
import importlib, importlib.resources, inspect
import tensorrt_llm
print(type(tensorrt_llm.__loader__).__name__, type(tensorrt_llm.__spec__.loader).__name__)
print(importlib.resources.files("tensorrt_llm").joinpath("data.txt").read_text())
print("STANDIN" in inspect.getsource(tensorrt_llm))
assert importlib.reload(tensorrt_llm) is tensorrt_llm
print(type(tensorrt_llm.__loader__).__name__)
import tensorrt_llm.llmapi
assert importlib.reload(tensorrt_llm) is tensorrt_llm
print(seen())
"""
    done = environment.run(code, standin(layout))
    assert done.stdout.splitlines() == [
        "SourceFileLoader SourceFileLoader",
        "a resource",
        "True",
        "SourceFileLoader",
        "TreeLlamaForCausalLM False",
    ]


def test_a_package_in_a_zip_file_is_watched_too(
    environment: Environment, standin: Callable[[str], Path], tmp_path: Path
) -> None:
    root = standin("lazy")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        for path in [root / "torch.py", *(root / "tensorrt_llm").rglob("*.*")]:
            archive.write(path, path.relative_to(root))
    code = f"""
{SEEN}
import importlib.resources
import tensorrt_llm.llmapi
print(type(tensorrt_llm.__loader__).__name__, seen())
print(importlib.resources.files("tensorrt_llm").joinpath("data.txt").read_text())
"""
    done = environment.run(code, tmp_path / "packed.zip")
    assert done.stdout.splitlines() == ["zipimporter TreeLlamaForCausalLM False", "a resource"]


@pytest.mark.parametrize("place", ["0", "len(sys.meta_path)", "1"])
def test_other_hooks_on_the_same_package_work_beside_it(
    environment: Environment, standin: Callable[[str], Path], place: str
) -> None:
    code = f"""
{SEEN}
import importlib.util
class Other:
    # As instrumentation libraries do it: find by the public function, guarded against themselves, and wrap the loader.
    busy = False
    def find_spec(self, name, path=None, target=None):
        if self.busy or name != "tensorrt_llm":
            return None
        Other.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            Other.busy = False
        inner = spec.loader
        class Loader:
            create_module = staticmethod(inner.create_module)
            @staticmethod
            def exec_module(module):
                module.__spec__.loader = module.__loader__ = inner
                inner.exec_module(module)
                print("other")
        spec.loader = Loader()
        return spec
sys.meta_path.insert({place}, Other())
import tensorrt_llm.llmapi
print(type(tensorrt_llm.__loader__).__name__, seen())
"""
    for layout in LAYOUTS:
        lines = environment.run(code, standin(layout)).stdout.splitlines()
        # Behind the path finder it is never asked.
        others = ["other"] if place != "len(sys.meta_path)" else []
        assert lines == [*others, "SourceFileLoader TreeLlamaForCausalLM False"]


def test_it_keeps_waiting_when_the_import_fails(
    environment: Environment, standin: Callable[[str], Path]
) -> None:
    code = f"""
{SEEN}
try:
    import tensorrt_llm
except ImportError as error:
    print(error, seen())
import tensorrt_llm
print(seen())
"""
    done = environment.run(code, standin("eager"), STANDIN_FAILS_ONCE="1")
    assert done.stdout.splitlines() == ["once None True", "TreeLlamaForCausalLM False"]


def test_threads_that_import_it_at_once_all_find_the_plugin(
    environment: Environment, standin: Callable[[str], Path]
) -> None:
    code = f"""
{SEEN}
from concurrent.futures import ThreadPoolExecutor
import importlib, threading
start = threading.Barrier(8)
def load(_):
    start.wait()
    importlib.import_module("tensorrt_llm.llmapi")
    return seen()
with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(load, range(8)))
print(seen())
"""
    assert environment.run(code, standin("eager")).stdout == "TreeLlamaForCausalLM False\n"
