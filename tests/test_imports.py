"""Imports point one way, as the layout promises, and loading a module has no side effects."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = {"train", "sample", "compare", "benchmarks"}
RUNTIME = {"numpy", "torch", "tqdm", "tensorboard", "tyro", "filelock"}
NETWORK = {"socket", "ssl", "urllib", "http", "ftplib", "smtplib", "requests", "httpx", "aiohttp"}

LEAVES = {f"gpt.model.{name}" for name in ("norms", "positions", "attention", "feedforward")}
SETTINGS = {"gpt.errors", "gpt.checks", "gpt.config", "gpt.config_files"}
BELOW = SETTINGS | {"gpt.streams", "gpt.model", "gpt.text"}

# Module or package -> what of ours it may import; the longest name that matches is its rule.
RULES = {
    "gpt.errors": set(),
    "gpt.streams": set(),
    "gpt.runfolder": {"gpt.errors", "gpt.checks"},
    "gpt.checks": {"gpt.errors"},
    "gpt.config": {"gpt.errors", "gpt.checks"},
    "gpt.config_files": {"gpt.errors", "gpt.config", "gpt.text.opening"},
    "gpt.text": {"gpt.errors", "gpt.text"},
    "gpt.model": {"gpt.errors", "gpt.streams"},  # leaves take numbers, not the config
    "gpt.model.kernels": set(),
    "gpt.model.norms": {"gpt.model.kernels"},
    "gpt.model.feedforward": {"gpt.model.kernels"},
    "gpt.model.attention": {"gpt.model.kernels", "gpt.model.norms"},
    "gpt.model.init": {"gpt.streams", "gpt.model.norms"},
    "gpt.model.block": {"gpt.errors", "gpt.config", *LEAVES},
    "gpt.model.gpt": {"gpt.errors", "gpt.config", "gpt.model"},
    "gpt.model.count": {"gpt.config", "gpt.model.block"},
    "gpt.training": BELOW | {"gpt.training", "gpt.native", "gpt.exits"},
    "gpt.native": set(),
    "gpt.sampling": BELOW | {"gpt.sampling", "gpt.native"},
    "gpt.exits": {"gpt.errors", "gpt.text"},
    "gpt.commandline": SETTINGS | {"gpt.text", "gpt.exits"},
    "gpt.corpus": SETTINGS | {"gpt.text"},
    # The rest of the package puts those together; the lab and other formats are above it.
    "gpt": BELOW
    | {
        "gpt.training",
        "gpt.sampling",
        "gpt.native",
        "gpt.commandline",
        "gpt.corpus",
        "gpt.exits",
        "gpt.run",
        "gpt.resuming",
        "gpt.runfolder",
    },
    "gpt.lab": {"gpt"},
    "gpt.interop": {"gpt"},
}
# Answering --help, a wrong flag or an unusable text must not wait for torch.
WITHOUT_TORCH = ["gpt", "gpt.exits", "gpt.config", "gpt.commandline", "gpt.corpus", "gpt.text"]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    name_of(path): path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("gpt/**/*.py"))
}


def imports(source: str, module: str = "", *, at_load: bool = False) -> set[str]:
    """Every module that the source imports, inside functions too (not ``at_load``).

    Imports for type checkers only are left out: they never happen. ``from gpt.training import
    loop`` counts as the submodule where there is one.
    """
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
            continue
        if at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            home = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                inner = f"{home}.{alias.name}"
                found.add(inner if inner in SOURCES else home)
        waiting += ast.iter_child_nodes(node)
    return found


def inside(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def rule_for(module: str) -> set[str]:
    return RULES[max((name for name in RULES if inside(module, {name})), key=len)]


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_reader_of_imports_sees_functions_and_relative_ones_but_no_type_hints():
    source = """
import os.path
if TYPE_CHECKING:
    import gpt.lab
else:
    import gpt.errors
def late():
    from gpt.training import loop
    from gpt.training.loop import train
class C:
    from ..text import windows
    from . import plan
"""
    found = imports(source, "gpt.training.some")
    ours = {"gpt.errors", "gpt.training.loop", "gpt.text.windows", "gpt.training.plan"}
    assert found == {"os.path", *ours}
    assert imports(source, "gpt.training.some", at_load=True) == found - {"gpt.training.loop"}


def test_there_is_something_to_check():
    assert len(SOURCES) > 20
    assert all(name in SOURCES for name in RULES)


def tops(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


def test_imports_point_one_way():
    wrong = {}
    for module, source in SOURCES.items():
        ours = {name for name in imports(source, module) if inside(name, {"gpt"})}
        wrong[module] = {name for name in ours if not inside(name, rule_for(module))}
    assert not {module: names for module, names in wrong.items() if names}


def test_nothing_imports_the_scripts_or_the_tests():
    for module, source in SOURCES.items():
        used = tops(imports(source, module))
        assert not used & (SCRIPTS | {"tests", "helpers", "reference"}), module


def test_loading_a_module_needs_only_what_every_user_has():
    for module, source in SOURCES.items():
        used = tops(imports(source, module, at_load=True))
        assert used <= RUNTIME | {"gpt"} | sys.stdlib_module_names, module


def test_no_module_uses_the_network():
    for module, source in SOURCES.items():
        assert not tops(imports(source, module)) & NETWORK, module


def clocks_that_can_be_set(source: str) -> list[int]:
    """Lines that read a clock that an administrator, or summer time, can turn back."""
    names = ("time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime")
    settable = {f"time.{name}" for name in names}
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found = {f"{ast.unparse(node.value)}.{node.attr}"}
        elif isinstance(node, ast.ImportFrom):
            found = {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found = {alias.name for alias in node.names}
        else:
            continue
        if found & settable or "datetime" in tops(found):
            lines.append(node.lineno)
    return sorted(lines)


def test_durations_come_from_clocks_that_nobody_can_set():
    bad = (
        "import time\nfrom time import time_ns\ntime.time()\ntime.perf_counter()\n"
        "import datetime\nfrom datetime import date\ntime.strftime('%c')"
    )
    assert clocks_that_can_be_set(bad) == [2, 3, 5, 6, 7]
    scripts = {path.stem: path.read_text(encoding="utf-8") for path in ROOT.glob("*.py")}
    assert scripts.keys() >= {"train", "sample", "compare"}
    for module, source in (SOURCES | scripts).items():
        # TensorBoard's format holds the time of day with every point; no duration comes from it.
        assert not clocks_that_can_be_set(source) or module == "gpt.training.board", module


def test_the_reference_uses_numpy_and_the_standard_library_only():
    paths = sorted(ROOT.glob("tests/reference/**/*.py"))
    assert paths
    own = {"reference"} | {path.stem for path in paths}
    for path in paths:
        used = tops(imports(path.read_text(encoding="utf-8"), f"reference.{path.stem}"))
        assert used <= {"numpy"} | own | sys.stdlib_module_names, path.name


def test_the_command_line_and_the_text_load_without_torch():
    modules = [name for name in SOURCES if name == "gpt" or inside(name, {*WITHOUT_TORCH[1:]})]
    assert {"gpt.config", "gpt.commandline", "gpt.text.reading"} <= set(modules)
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"


@pytest.mark.slow
def test_loading_every_module_opens_no_connection():
    code = f"""
import sys
def watch(event, arguments):
    if event.startswith("socket.") or event in ("urllib.Request", "http.client.connect"):
        if event not in ("socket.__new__", "socket.gethostname"):
            raise SystemExit(f"{{event}} {{arguments}}")
sys.addaudithook(watch)
import {", ".join(SOURCES)}
print("loaded")
"""
    assert run_python(code).strip() == "loaded"
