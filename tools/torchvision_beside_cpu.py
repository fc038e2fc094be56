"""Run torchvision's operators on the CPU where the wheel is a CUDA build and PyTorch is one for CPUs alone.

    pip install --no-deps torchvision==0.28.0
    python tools/torchvision_beside_cpu.py script.py ...       runs a script with them

Its compiled part needs CUDA's runtime and PyTorch's libraries for CUDA, of which nothing is called on a CPU. Empty libraries with
the symbols that are missing stand for them, made with gcc in a temporary folder. Linux, with gcc and binutils.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

ABSENT = re.compile(r"lib(cudart|c10_cuda|torch_cuda)\.so[.\d]*")
"""Libraries that stand empty."""


def torchvision() -> ModuleType:
    """torchvision with its operators on the CPU. Raises ImportError where it is not installed, or does not load all the same."""
    spec = importlib.util.find_spec("torchvision")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    compiled = None if folder is None else next(folder.glob("_C*.so"), None)
    if compiled is None:
        raise ImportError("no torchvision with a compiled part: pip install --no-deps torchvision==0.28.0")
    try:
        torch.ops.load_library(compiled)
    except OSError:
        with tempfile.TemporaryDirectory() as place:
            for library in _empty_libraries(compiled, Path(place)):
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            torch.ops.load_library(compiled)
    found = importlib.import_module("torchvision")
    if not found.extension._has_ops():
        raise ImportError("torchvision's compiled part does not load")
    return found


def _empty_libraries(compiled: Path, place: Path) -> list[Path]:
    """Make the libraries that a compiled part lacks, with the symbols that it wants of them."""
    wanted = [name for name in _needed(compiled) if ABSENT.fullmatch(name)]
    own = {
        name for library in Path(torch.__file__).parent.glob("lib/*.so") for name in _symbols(library, "--defined-only")
    }
    missing = {name for name in _symbols(compiled, "--undefined-only", "--no-weak") if "cuda" in name} - own
    made = []
    for library in wanted:
        runtime = library.startswith("libcudart")
        of_runtime = {name.partition("@")[0] for name in missing if f"@{library}" in name}
        others = {name for name in missing if "@" not in name} if library.startswith("libc10") else set()
        names = sorted(of_runtime if runtime else others)
        source, file, versions = (place / f"{library}{end}" for end in (".c", "", ".version"))
        source.write_text("".join(map(_written, names)))
        versions.write_text(f"{library} {{ global: *; }};\n")
        more = [f"-Wl,--version-script={versions}"] if runtime else []
        subprocess.run(
            ["gcc", "-w", "-shared", "-fPIC", "-o", file, source, f"-Wl,-soname,{library}", *more], check=True
        )
        made.append(file)
    return made


def _written(name: str) -> str:
    """A symbol in C: a table for an object, and a function that does nothing for all others."""
    if name.endswith("allocatorE"):
        return f"void* {name}[64];\n"
    if name == "__cudaRegisterFatBinary":
        return f"void* {name}(void* code) {{ static void* handle[16]; return handle; }}\n"
    return f"long {name}(void) {{ return 0; }}\n"


def _needed(library: Path) -> list[str]:
    text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", text)


def _symbols(library: Path, *which: str) -> list[str]:
    """Names of dynamic symbols, with the version after @ where they have one."""
    text = subprocess.run(["nm", "-D", *which, library], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1] for line in text.splitlines() if line.strip()]


if __name__ == "__main__":
    torchvision()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
