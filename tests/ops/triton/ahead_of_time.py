"""Compiles kernels for an H200 on a machine without a GPU: what the interpreter accepts need not compile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers of a thread, bytes of shared memory of a program, bytes spilled."""

    registers: int
    shared: int
    spilled: int


def compile_for_hopper(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
    unaligned: Collection[str] = (),
) -> Resources:
    """Compiles one variant of a kernel for sm_90.

    Args:
        kernel: a function under ``@triton.jit``, in a process without TRITON_INTERPRET.
        types: of each argument that is not a constant, as Triton spells them: "*bf16", "i32", "fp32".
        constants: values of the constexpr arguments.
        unaligned: arguments that may be anything; all others are multiples of 16, as sizes and addresses of real models
            are: only then are loads wide and run ahead.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = [n for n in names if signature[n] not in ("constexpr", "fp32") and n not in unaligned]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers = int(re.search(r"REG:(\d+)", report).group(1))
    stack = int(re.search(r"STACK:(\d+)", report).group(1))
    return Resources(registers, compiled.metadata.shared, stack)


def run_uninterpreted(program: str) -> None:
    """Runs a program that compiles kernels, in a process that does not interpret them; asserts that it ends well."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(["src", "."])
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
