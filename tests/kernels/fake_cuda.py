"""A fake GPU, for which torch.compile writes code on a machine without one.

The whole pipeline runs, from Dynamo to Inductor, forward and backward, also with a
build of torch that knows only CPUs. Tensors on `cuda:0` are fake ones, and nothing is
launched.

Private interfaces of torch and triton, seen in torch 2.13 and triton 3.9.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.fx_passes import joint_graph
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch._inductor.utils import clear_caches
from torch.utils import _pytree as pytree
from torch.utils import _triton as triton_support
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.cpp_extension import include_paths, library_paths
from triton.backends.compiler import GPUTarget

# CUDA C++ programming guide, "Compute capabilities"; the data sheet of the product.
_SHARED = 227 << 10
_H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=_SHARED,
    shared_memory_per_multiprocessor=_SHARED + 1024,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    L2_cache_size=50 << 20,
    gcnArchName="",
    is_integrated=False,
    is_multi_gpu_board=False,
)

# What C++ asks about a CUDA tensor: a guard for its device when Python indexes it, and
# streams when autograd traces a backward. Without a GPU both raise, also for a fake
# tensor; here one device has one stream, and nothing happens on it.
_PRETEND = """
#include <cstring>
#include <utility>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Stream only() {
    return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0));
  }
  Stream getStream(Device) const noexcept override { return only(); }
  Stream exchangeStream(Stream) const noexcept override { return only(); }
};

struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};

// A call undoes the call before. torch makes its hooks once and has no setter: theirs
// become ours by the first word, which is the table of virtual functions.
extern "C" void pretend_or_stop() {
  static Guard guard;
  static const impl::DeviceGuardImplInterface* other_guard = &guard;
  static Hooks hooks;
  static void* other_hooks = *reinterpret_cast<void**>(&hooks);
  const auto cuda = static_cast<size_t>(DeviceType::CUDA);
  other_guard = impl::device_guard_impl_registry[cuda].exchange(other_guard);
  auto* torch_hooks = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  std::swap(*reinterpret_cast<void**>(torch_hooks), other_hooks);
}
"""


@functools.cache
def _pretend_or_stop() -> Callable[[], None]:
    """The function of _PRETEND, compiled once per version of torch."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError(
            "fake_cuda: without a GPU it needs a C++ compiler, to compile thirty lines "
            "against torch's headers, and there is no g++; install it or set CXX"
        )
    digest = hashlib.sha256(f"{torch.__version__}{_PRETEND}".encode()).hexdigest()
    folder = pathlib.Path(tempfile.gettempdir(), f"cpcompile_fake_cuda_{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{digest[:16]}.so"
    if not library.exists():
        command = [compiler, "-x", "c++", "-", "-std=c++20", "-shared", "-fPIC"]
        command += [f"-I{path}" for path in include_paths()]
        command += [f"-L{path}" for path in library_paths()]
        # Another process may do the same: the file gets its name when it is complete.
        part = library.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [*command, "-lc10", "-ltorch_cpu", "-o", str(part)],
            input=_PRETEND.encode(),
            check=True,
            timeout=120,
        )
        part.replace(library)
    loaded: Callable[[], None] = ctypes.CDLL(str(library)).pretend_or_stop
    return loaded


def _first_choice(*arguments: Any, **_: Any) -> dict[Any, float]:
    """Instead of do_autotuning: nothing can be timed, the first choice is fastest."""
    choices = arguments[6]  # after self, name, nodes, layout, their makers, a key
    return {choice: float(order) for order, choice in enumerate(choices, 1)}


class _ConstantsOnCPU(TorchDispatchMode):
    """What is allocated on a GPU is allocated on the CPU."""

    def __torch_dispatch__(
        self, fn: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(
            torch.device, lambda _: torch.device("cpu"), (args, kwargs or {})
        )
        return fn(*args, **kwargs)


class _ConstantFolder(UniformValueConstantFolder):
    """Inductor's, which computes the constants of a graph on their device."""

    def _add_peephole_patterns(self) -> None:
        with _ConstantsOnCPU():
            super()._add_peephole_patterns()

    def _deduce_value(self, node: fx.Node) -> Any:
        with _ConstantsOnCPU():
            return super()._deduce_value(node)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """As if one GPU were here, for what only writes code."""
    device = _H100

    def always(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    queries = {
        "current_device": always(0),
        "device_count": always(1),
        "get_device_properties": always(device),
        "is_bf16_supported": always(True),
    }
    on_module = {
        **queries,
        "get_device_capability": always((device.major, device.minor)),
        "get_device_name": always(device.name),
        "is_initialized": always(True),
        "is_tf32_supported": always(True),
        "set_device": always(None),
    }
    on_interface = {name: staticmethod(query) for name, query in queries.items()}
    driver = mock.MagicMock(name="triton driver")
    target = GPUTarget("cuda", 10 * device.major + device.minor, device.warp_size)
    driver.get_current_target.return_value = target
    driver.get_current_device.return_value = 0
    with ExitStack() as stack:
        enter = stack.enter_context
        if not torch.cuda.is_available():
            _pretend_or_stop()()
            stack.callback(_pretend_or_stop())
        # A device's own thread would need the device; AOTAutograd has none either.
        enter(torch.autograd.set_multithreading_enabled(False))
        enter(mock.patch.multiple(torch.cuda, **on_module))
        enter(
            mock.patch.multiple(
                CudaInterface, is_available=staticmethod(always(True)), **on_interface
            )
        )
        worker = {"get_device_properties": on_interface["get_device_properties"]}
        enter(mock.patch.multiple(CudaInterface.Worker, **worker))
        enter(mock.patch.object(triton.runtime.driver, "_active", driver))
        enter(
            mock.patch.multiple(
                AlgorithmSelectorCache,
                do_autotuning=_first_choice,
                make_precompile_fn=always(dict),
            )
        )
        enter(
            mock.patch.object(
                joint_graph, "UniformValueConstantFolder", _ConstantFolder
            )
        )
        _forget_device()
        stack.callback(_forget_device)
        yield


def _forget_device() -> None:
    """Empty the caches of what torch asked about the device."""
    clear_caches()
    DeviceProperties.create.cache_clear()
    for function in vars(triton_support).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
