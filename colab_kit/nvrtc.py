"""CUDA C++ compiled at run time, by the NVRTC that comes with torch; no toolkit, no C++ compiler."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Any


def check(result: int, what: str) -> None:
    if result:
        raise RuntimeError(f"{what} failed with code {result}")


@functools.cache
def driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def compiler(major: str) -> Any:
    """NVRTC of CUDA `major`, as the loader finds it, or from the packages that torch's wheels bring."""
    names = [f"libnvrtc.so.{major}"]
    spec = importlib.util.find_spec("nvidia")
    for folder in map(Path, spec.submodule_search_locations if spec else ()):
        names += map(str, folder.glob(f"*/lib/libnvrtc.so.{major}*"))
    for name in names:
        try:
            for part in Path(name).parent.glob("libnvrtc-builtins.so.*"):  # which may not find them itself
                ctypes.CDLL(str(part))
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"there is no NVRTC of CUDA {major}")


def cubin(source: bytes, macros: dict[str, int], capability: tuple[int, int], major: str | None = None) -> bytes:
    """Machine code for a compute capability. RuntimeError with the compiler's words where it fails."""
    if major is None:
        import torch

        major = torch.version.cuda.split(".")[0]
    nvrtc, program, size = compiler(major), ctypes.c_void_p(), ctypes.c_size_t()
    name = f"{capability[0]}{capability[1]}" + "a" * (capability == (9, 0))  # a: with what only Hopper has
    options = [f"--gpu-architecture=sm_{name}", "--std=c++17"]
    options.append("--device-as-default-execution-space")  # or CUDA 13.0's takes generic lambdas for host code
    options += [f"-D{name}={value}" for name, value in macros.items()]
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None), "nvrtcCreateProgram")
    try:
        flags = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        if nvrtc.nvrtcCompileProgram(program, len(options), flags):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError("the kernel does not compile: " + log.value.decode()[:400])
        check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        binary = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, binary), "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


def load(binary: bytes, name: bytes, shared: int) -> Any:
    """A kernel in the current CUDA context, allowed `shared` bytes of dynamic shared memory."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver().cuModuleLoadData(ctypes.byref(module), binary), "cuModuleLoadData")
    check(driver().cuModuleGetFunction(ctypes.byref(function), module, name), "cuModuleGetFunction")
    check(driver().cuFuncSetAttribute(function, 8, shared), "cuFuncSetAttribute")  # 8: dynamic shared memory, at most
    return function


class Attribute(ctypes.Structure):
    """CUlaunchAttribute"""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


def launch(
    kernel: Any, grid: tuple, threads: int, shared: int, arguments: list, early: bool = False, cluster: int = 1
) -> None:
    """On torch's current stream. `arguments`: tensors (by address, None is 0), ints, floats and ctypes' structures.

    From sm_90 on, `early`: as soon as the kernel before it lets it (griddepcontrol), for whose end it waits itself;
    `cluster`: so many blocks, next to each other along z, run at the same time and reach each other's shared memory.
    """
    import torch

    values = [
        ctypes.c_int(v) if isinstance(v, int) else ctypes.c_float(v) if isinstance(v, float)
        else v if isinstance(v, ctypes.Structure) else ctypes.c_void_p(v.data_ptr() if v is not None else None)
        for v in arguments
    ]  # fmt: skip
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    config = launch_config(grid, threads, shared, early, cluster)
    config.stream = torch.cuda.current_stream().cuda_stream
    check(driver().cuLaunchKernelEx(ctypes.byref(config), kernel, pointers, None), "cuLaunchKernelEx")


def launch_config(grid: tuple, threads: int, shared: int, early: bool, cluster: int) -> Config:
    attributes = [Attribute(6, 0, (1,))] * early  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    if cluster > 1:
        attributes.append(Attribute(4, 0, (1, 1, cluster)))  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    array = (Attribute * len(attributes))(*attributes)
    return Config(grid, (threads, 1, 1), shared, None, ctypes.cast(array, ctypes.POINTER(Attribute)), len(attributes))


def clusters_at_once(kernel: Any, grid: tuple, threads: int, shared: int, cluster: int) -> int:
    """How many clusters of so many blocks the card can run at the same time."""
    found, config = ctypes.c_int(), launch_config(grid, threads, shared, False, cluster)
    result = driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), kernel, ctypes.byref(config))
    check(result, "cuOccupancyMaxActiveClusters")
    return found.value
