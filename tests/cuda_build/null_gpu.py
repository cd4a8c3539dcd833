"""Build ``null_gpu.c``, and run programs under it: two GPUs that compute nothing, on which torch's own CUDA code runs."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("null_gpu.c")
ROOT = SOURCE.parents[2]
_WORDS = (
    "host device global shared constant managed forceinline device_builtin cudart_builtin device_builtin_texture_type"
)
_HOST_DEFINES = "\n".join(
    [
        *(f"#define __{word}__" for word in [*_WORDS.split(), "device_builtin_surface_type"]),
        *(f"#define __{word}__(n) __attribute__((aligned(n)))" for word in ("align", "builtin_align")),
        *(f"#define {word}" for word in ("CUDARTAPI", "CUDARTAPI_CDECL", "CUDA_CB")),
    ]
)
"""What CUDA's compiler brings and its runtime's headers include: torch's wheels have the headers alone."""


@functools.cache
def missing() -> str:
    """Return why the GPUs cannot be built here, "" if they can."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        return "needs Linux and a C compiler"
    if not (torch.version.cuda or "").startswith("13."):
        return f"is written for the runtime of CUDA 13, not {torch.version.cuda}"
    return "" if _headers() else "needs the headers of CUDA's runtime, which come with torch's CUDA build"


def _headers() -> Path | None:
    packages = Path(torch.__file__).parents[1] / "nvidia"
    return next((path.parent for path in packages.glob("*/include/cuda_runtime_api.h")), None)


@functools.cache
def library() -> Path:
    """Return the library to preload; it has the driver's name, by which torch looks for that."""
    folder = Path(tempfile.mkdtemp(prefix="null-gpu-"))
    (folder / "crt").mkdir()
    (folder / "crt" / "host_defines.h").write_text(_HOST_DEFINES)
    made = folder / "null_gpu.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", f"-I{folder}", f"-I{_headers()}"]
    subprocess.run([*command, str(SOURCE), "-o", str(made)], check=True)
    return made


def run(*arguments: str, folder: Path, limit_s: float = 300.0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with ``arguments`` in ``folder``, on two GPUs that compute nothing."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
    }
    paths = [str(ROOT / "src"), str(ROOT), str(SOURCE.parent), str(ROOT / "tests")]
    environment |= {
        "LD_PRELOAD": str(library()),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
