"""Cases that are compiled ahead of time, and the figures of the results: see aot.py."""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cpcompile.geometry.visibility import Visible
from cpcompile.kernels.configs import ARCHITECTURES, Kernel, StepConfig, configs
from cpcompile.kernels.constants import (
    NO_MODIFIERS,
    BiasConstants,
    DropoutConstants,
    RowLimits,
    ScoreModConstants,
    ScoreModifiers,
    step_constants,
    tensor_names,
)
from cpcompile.kernels.render import OUTPUT, Argument, rendered
from cpcompile.kernels.score_functions import triton_functions
from tools.bench.aot_score_mod import SCORE_MOD

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes that one program may use. CUDA C++ programming guide, "Compute capabilities";
# AMD CDNA 3 instruction set, 64 KB of LDS.
SHARED_BYTES = {
    "sm80": 163 << 10,
    "sm90": 227 << 10,
    "sm100": 227 << 10,
    "gfx942": 64 << 10,
}
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
DIMS = (32, 64, 128, 256)
TOKENS, HEADS, KV_HEADS = 8192, 16, 4
VISIBLE = {"full": Visible(), "causal": Visible(upper=(1, 1))}
# What else the kernels do, under limits that are vectors; in bfloat16, by the defaults.
_VECTORS = [torch.empty(n, dtype=torch.int32, device="meta") for n in (TOKENS, TOKENS)]
_SEEDS = torch.empty(1, HEADS, dtype=torch.int32, device="meta")
_RAISED = torch.empty(1, HEADS, TOKENS, device="meta")
# For two ranks: a table of all keys, or of all distances.
_OF_KEYS = torch.empty(1, HEADS, 2 * TOKENS, device="meta")
_OF_DISTANCES = torch.empty(1, HEADS, 4 * TOKENS - 1, device="meta")
CHANGES = {
    "vectors, softcap": ScoreModifiers(softcap=50.0),
    "vectors, dropout": ScoreModifiers(
        dropping=DropoutConstants(round(0.1 * 2**31), 0.9, _SEEDS, *_VECTORS)
    ),
    "vectors, bias of keys": ScoreModifiers(
        biasing=BiasConstants(_OF_KEYS, _VECTORS[1], None, _RAISED)
    ),
    "vectors, bias of distances": ScoreModifiers(
        biasing=BiasConstants(_OF_DISTANCES, _VECTORS[1], _VECTORS[0], _RAISED)
    ),
}
CHANGES["vectors, score_mod"] = ScoreModifiers(
    scoring=ScoreModConstants(
        triton_functions(SCORE_MOD) or "",
        torch.empty(HEADS, device="meta"),
        *_VECTORS,
        torch.empty(1, dtype=torch.int32, device="meta"),
    )
)
BIASED = tuple(name for name, x in CHANGES.items() if x.biasing is not None)


@dataclass(frozen=True)
class Case:
    """One kernel to compile: a step in the middle of a ring."""

    architecture: str
    kernel: Kernel
    dtype: torch.dtype
    dim: int
    config: StepConfig
    visible: str
    is_default: bool


@dataclass(frozen=True)
class Figures:
    """What the compiler made of a case; `error` is its message if it failed.

    registers: per thread; on AMD vector registers.
    spills: instructions that store registers to memory; on AMD spilled registers.
    products: matrix instructions, of the kind that the architecture is fastest with
        (HMMA; HGMMA on sm90; UTCHMMA and the like on sm100; MFMA).
    """

    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    products: int = 0
    error: str = ""


def cases(
    architectures: tuple[str, ...] = ARCHITECTURES,
    every_visibility: Callable[[bool], bool] = lambda is_default: True,
) -> Iterator[Case]:
    """Yield all configurations of the tables, and the defaults with CHANGES.

    `every_visibility` says for the default and for the others whether to compile them
    without a limit too; with the causal limit a kernel contains both of its loops.
    """
    for architecture in architectures:
        for kernel in Kernel:
            of_steps = (*VISIBLE, *CHANGES)
            for dtype in DTYPES:
                for dim in DIMS:
                    table = configs(kernel, architecture, dtype, dim)
                    for config in table:
                        is_default = config == table[0]
                        changed = is_default and dtype is torch.bfloat16
                        names = of_steps if changed else tuple(VISIBLE)
                        if kernel is Kernel.DBIAS:
                            names = BIASED
                        for visible in names:
                            if visible != "full" or every_visibility(is_default):
                                yield Case(
                                    architecture,
                                    kernel,
                                    dtype,
                                    dim,
                                    config,
                                    visible,
                                    is_default,
                                )


@dataclass(frozen=True)
class Prepared:
    """What the compiler is given for a case."""

    source: ASTSource
    text: str  # of the kernel
    options: dict[str, int]

    def digest(self, architecture: str) -> str:
        """Return equal texts for equal work.

        Work is the kernel, its sizes, options, the target and the version of Triton.
        """
        given = (
            triton.__version__,
            architecture,
            self.text,
            sorted(self.source.signature.items()),
            sorted(self.source.constants.items()),
            sorted(self.options.items()),
        )
        return hashlib.sha256(repr(given).encode()).hexdigest()[:16]


def prepared(case: Case) -> Prepared:
    """Render the kernel of a case for its sizes."""
    kernel, config = case.kernel, case.config
    changes = CHANGES.get(case.visible, NO_MODIFIERS)
    limits = RowLimits(VISIBLE.get(case.visible, Visible()))
    if case.visible in CHANGES:
        limits = RowLimits(upper=torch.empty(TOKENS), lower=torch.empty(TOKENS))
    constants = step_constants(
        config=config,
        rows=TOKENS,
        keys=TOKENS,
        head_dim=case.dim,
        value_dim=case.dim,
        heads_per_kv=HEADS // KV_HEADS,
        limits=limits,
        accumulate=True,
        scale=case.dim**-0.5,
        precision="ieee",
        divides=lambda size, block: size % block == 0,
        changes=changes,
    )
    names = tensor_names(kernel, accumulate=True, limits=limits, changes=changes)
    shapes = {name: _shape(name, kernel, case.dim) for name in (*names, OUTPUT)}
    shapes |= {name: tuple(x.shape) for name, x in changes.tensors.items()}
    ranks = {name: len(shapes[name]) for name in names}
    functions = "" if changes.scoring is None else changes.scoring.functions
    step = rendered(kernel, constants | {"INDEX_DTYPE": "tl.int32"}, ranks, functions)
    kinds = dict.fromkeys(("Q", "K", "V", "GRAD"), DTYPES[case.dtype])
    kinds |= dict.fromkeys(_INTEGERS, "i32")
    types = {name: kinds.get(name, "fp32") for name in shapes}
    signature = step.signature(types)
    literals: dict[tuple[int, ...], int] = {}
    hints: dict[tuple[int, ...], Any] = {}
    for index, argument in enumerate(step.arguments):
        if argument.dim is None:
            hints[(index,)] = [["tt.divisibility", 16]]
        else:
            literals[(index,)] = _value(argument, shapes[argument.tensor])
            signature[argument.name] = "constexpr"
    source = ASTSource(step.function, signature, literals, hints)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return Prepared(source, step.source, options)


def digest(case: Case) -> str:
    """Return a digest that changes when the case has to be compiled again."""
    return prepared(case).digest(case.architecture)


def measure(case: Case) -> Figures:
    """Compile one case and read the binary."""
    given = prepared(case)
    try:
        target = TARGETS[case.architecture]
        compiled = triton.compile(given.source, target=target, options=given.options)
    except Exception as error:  # whatever a compiler raises is the finding
        return Figures(error=f"{type(error).__name__}: {error}".splitlines()[0])
    return _read(compiled)


_INTEGERS = ("UPPER", "LOWER", "SEEDS", "ROWS", "KEYS", "OFFSETS", "BATCHES")


def _shape(name: str, kernel: Kernel, dim: int) -> tuple[int, ...]:
    if name in _INTEGERS:
        return (TOKENS,)
    if name == OUTPUT and kernel is Kernel.DBIAS:
        return 2, 1, HEADS, 2 * TOKENS
    if name in ("LSE", "DELTA", "LSE_IN", "LSE_OUT"):
        return 1, HEADS, TOKENS
    of_keys = name in ("K", "V", "DK_IN", "DV_IN", "DV_OUT")
    of_keys |= name == OUTPUT and kernel is Kernel.DKDV
    return 1, KV_HEADS if of_keys else HEADS, TOKENS, dim


def _value(argument: Argument, shape: tuple[int, ...]) -> int:
    assert argument.dim is not None
    if not argument.is_stride:
        return shape[argument.dim]
    return int(torch.empty(shape, device="meta").stride(argument.dim))


def _read(compiled: Any) -> Figures:
    """Read figures from the binary of NVIDIA's, or the assembly of AMD's compiler."""
    shared = int(compiled.metadata.shared)
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]

        def count(name: str) -> int:
            found = re.search(rf"\.{name}:\s+(\d+)", text)
            return int(found[1]) if found else 0

        products = len(re.findall(r"v_mfma", text))
        return Figures(count("vgpr_count"), count("vgpr_spill_count"), shared, products)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        assembly = _tool("nvdisasm", "-c", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    capability = compiled.metadata.target.arch
    kind = {90: r"\bHGMMA", 100: r"\bUTC\w*MMA"}.get(capability, r"\bHMMA")
    products = len(re.findall(kind, assembly))
    spills = len(re.findall(r"\bSTL", assembly))
    return Figures(int(registers[1]), spills, shared, products)


def _tool(name: str, *arguments: str) -> str:
    folder = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    command = [str(folder / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def measure_all(wanted: list[Case], processes: int | None = None) -> list[Figures]:
    """Run `measure` on every case, in several processes; return figures in order."""
    processes = processes or os.cpu_count() or 1
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        return list(pool.map(measure, wanted, chunksize=8))
