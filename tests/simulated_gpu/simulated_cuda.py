"""An ordinary CPU build of torch passes for NVIDIA cards, so that lines which only a card reaches are run without one.

``pretend(A6000)`` changes the process for good: call it in one that is thrown away (a fork, a child).

What it finds: a tensor on the wrong side, a torch.cuda function that is called wrongly or is not answered here, each place
where the host waits for the card, host memory that is read while a copy is under way, memory that runs out. Of several
cards, one a process: which backend is asked for, what DDP is given, how often gradients are exchanged. What it cannot
find: anything of kernels (it computes on the CPU), of the compiler, of speed, of shards.

How: a tensor of the card is a ``CudaTensor``, which holds a CPU tensor and says that it is on cuda:0. A dispatch mode
brings every operation to ``_operate``, below autograd and autocast, which checks the sides and computes on the CPU. C++
takes such a tensor for one of XLA: a device that a CPU build needs no streams for, and whose tensors CUDA's autocast casts.
torch.cuda stays PyTorch's own Python, with its signatures and checks; the C functions beneath it, which a CPU build lacks,
are answered here, and any other raises AttributeError. NCCL is gloo, between the CPU tensors.
"""

import contextlib
import ctypes
import functools
import inspect
import os
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import run_in_fork
from torch import nn
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves
from transformers import masking_utils

from ursa_minor.base.gpus import AMPERE
from ursa_minor.machine import device as hardware

PRODUCT = str(Path(__file__).resolve().parents[2])
CPU, CUDA, XLA = torch.device("cpu"), torch.device("cuda", 0), torch.device("xla", 0)
aten, Tensor = torch.ops.aten, torch.Tensor
attend = F.scaled_dot_product_attention  # PyTorch's own


@dataclass(frozen=True)
class GpuModel:
    """A card to pretend.

    Attributes:
        name: as the driver says it.
        capability: compute capability.
        memory: bytes.
        most_sequences: a micro-batch of more runs out of memory; None: only ``memory`` is a limit.
        count: cards of the machine, all alike.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    most_sequences: int | None = None
    count: int = 1


T4 = GpuModel("Tesla T4", (7, 5), 15_642_329_088)
RTX_3060 = GpuModel("NVIDIA GeForce RTX 3060", (8, 6), 12_625_379_328)
A6000 = GpuModel("NVIDIA RTX A6000", (8, 6), 51_033_931_776)
H200 = GpuModel("NVIDIA H200", (9, 0), 150_109_880_320)
UNKNOWN = GpuModel("NVIDIA Graphics Device", (12, 1), 20 * 2**30)
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


class CudaTensor(Tensor):
    """A tensor of the card; ``host`` is the CPU tensor with its values, in the same memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: machine.device)
    is_cuda, is_cpu = property(lambda self: True), property(lambda self: False)

    @staticmethod
    def __new__(cls, host: Tensor) -> "CudaTensor":
        how = {
            "strides": host.stride(),
            "storage_offset": host.storage_offset(),
            "dtype": host.dtype,
            "device": XLA,
        }
        tensor = Tensor._make_wrapper_subclass(
            cls, host.size(), **how, _extra_dispatch_keys=AUTOCAST
        )
        tensor.host, tensor.block = host, machine.allocate(host.untyped_storage())
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, kinds, args=(), kwargs=None):
        return _operate(func, args, kwargs or {})

    def get_device(self) -> int:
        return machine.device.index

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()


class _Making(TorchDispatchMode):
    """Brings what has no tensor of the card among its arguments to ``_operate`` too: it may make one."""

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        return _operate(func, args, kwargs or {})


class _Block:
    """A piece of the card's memory, which is free when no tensor of it is left."""

    def __init__(self, size: int):
        self.size = size
        machine.allocated += size
        machine.peak = max(machine.peak, machine.allocated)
        machine.reserved = max(machine.reserved, machine.allocated)

    def __del__(self):
        if machine is not None:  # the interpreter ends
            machine.allocated -= self.size


class Machine:
    """The one card of this process: what is on it, what is on the way, and where the host has waited for it.

    Attributes:
        device: where it is among the machine's cards.
        backend: of the process group, as it was asked for.
        wrapped: the arguments that DDP was given.
        exchanged: bytes of gradients.
        waits: how often the host waited: (for "read", "write" or "synchronize", the product's function) to a count.
        kernels: (attention kernel that would have run, the product's function) to a count.
        products: (type of a matrix product, tf32 included, the product's function) to a count.
        watched: (an operation of ``WATCHED`` and the type that it computes, the product's function) to a count.
        compiled: the arguments of each torch.compile.
        allocator: its settings when CUDA was initialized; what is set later has no effect.
        emptied: how often unused memory was given back.
        profiled: the activities that a profiler was asked for.
        allocated, peak, reserved: bytes.
        others: bytes that other programs hold.
        fraction: of the card's memory that this process may take.
    """

    def __init__(self, card: GpuModel):
        self.card, self.device = card, CUDA
        self.waits, self.kernels, self.products, self.watched = (
            Counter(),
            Counter(),
            Counter(),
            Counter(),
        )
        self.compiled: list[dict] = []
        self.profiled: list[str] = []
        self.wrapped: dict = {}
        self.backend: str | None = None
        self.allocator: str | None = None
        self.allocated = self.peak = self.reserved = self.others = self.emptied = self.exchanged = 0
        self.fraction = 1.0
        self.generator = torch.Generator()
        self._blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()
        self._pinned: dict[
            int, torch.UntypedStorage
        ] = {}  # kept, so that no address is another memory's later
        self._downloads: list[tuple[Tensor, Tensor]] = []

    def allocate(self, storage: torch.UntypedStorage) -> _Block:
        """Return the piece of memory that stands for a storage; views share one."""
        block = self._blocks.get(storage._cdata)
        if block is None:
            if self.allocated + storage.nbytes() > self.fraction * self.card.memory:
                raise _out_of_memory()
            block = self._blocks[storage._cdata] = _Block(storage.nbytes())
        return block

    def wait(self, what: str) -> None:
        """The host waits: all copies are done."""
        self.waits[what, _place()] += 1
        downloads, self._downloads = self._downloads, []
        for host, values in downloads:
            host.copy_(values)

    def pin(self, host: Tensor) -> Tensor:
        """Call a CPU tensor's memory pinned."""
        self._pinned[host.untyped_storage().data_ptr()] = host.untyped_storage()
        return host

    def is_pinned(self, host: Tensor) -> bool:
        """Return whether a CPU tensor lies in pinned memory."""
        return host.untyped_storage().data_ptr() in self._pinned

    def download(self, values: Tensor, host: Tensor, non_blocking: bool) -> Tensor:
        """Copy into a CPU tensor. Into pinned memory, with non_blocking, the values come when the host has waited."""
        if non_blocking and self.is_pinned(host):
            self._downloads.append((host, values.to(host.dtype, copy=True)))
            return host.fill_(float("nan") if host.is_floating_point() else -1)
        self.wait("read")
        return host.copy_(values)

    @contextlib.contextmanager
    def random(self) -> Iterator[None]:
        """Draw from the card's generator inside the block, and leave the CPU's as it was."""
        cpu = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(cpu)


machine: Machine | None = None  # pretend() sets it


def _out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no room for it."
    )


def _place() -> str:
    """Return the innermost function of the product that is running, as file.function."""
    frame = sys._getframe(1)
    while frame is not None:
        folder, file = os.path.split(frame.f_code.co_filename)
        if folder == PRODUCT or folder.startswith(os.path.join(PRODUCT, "ursa_minor")):
            return (
                f"{file.removesuffix('.py')}.{frame.f_code.co_qualname.partition('.<locals>')[0]}"
            )
        frame = frame.f_back
    return "elsewhere"


# ---- operations

# In these the host learns what or how many.
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.bincount, aten.equal}
WAITING |= {aten._unique2, aten.unique_dim, aten.unique_consecutive}
INDEXING = {aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_}
MULTIPLYING = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
# Whose type, or whose being used at all, the product chooses.
WATCHED = {
    aten._fused_adamw_,
    aten._log_softmax,
    aten.exp_,
    aten.linalg_vector_norm,
    aten.logsumexp,
}
VARYING = {
    aten.cumsum,
    aten.kthvalue,
    aten.histc,
    aten.median,
    aten.put_,
}  # of what language models use


def _operate(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """Check the sides of an operation, note what a card would do, and compute it on the CPU."""
    if torch.is_inference_mode_enabled():  # what is made of other operations arrives whole
        with _Making():
            if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                return out
    name, device = func.overloadpacket, kwargs.get("device")
    tensors = [value for value in arg_tree_leaves(*args, **kwargs) if isinstance(value, Tensor)]
    cards = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
    on_card = bool(cards) if device is None else device.type == "cuda" or device == XLA
    if on_card and device is not None:
        if device.type == "cuda" and device.index not in (None, machine.device.index):
            raise RuntimeError(
                f"CUDA error: {device} is not the card of this process, {machine.device}"
            )
        kwargs = kwargs | {"device": CPU}
    if name is aten.is_pinned:
        return not cards and machine.is_pinned(args[0])
    if name is aten._pin_memory:
        return machine.pin(args[0].clone())
    if name is aten.copy_:
        return _copy(*args, **kwargs)
    if not cards and not on_card:
        pinned = kwargs.get("pin_memory")
        out = func(*args, **kwargs | ({"pin_memory": False} if pinned else {}))
        return machine.pin(out) if pinned else out
    if name is aten._to_copy and bool(cards) != on_card:
        return _move(func, args[0], kwargs)
    if (torch.Tag.inplace_view in func.tags and name is not aten.detach_) or name in (
        aten.set_,
        aten.resize_,
    ):
        raise NotImplementedError(f"simulated_cuda: no tensor changes its shape in place: {func}")
    if kwargs.get("generator") is not None:  # a card's own cannot be made here
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if len(cards) < len(tensors) or name in INDEXING:
        _check_one_side(
            func, args, [tensor for tensor in tensors if not isinstance(tensor, CudaTensor)]
        )
    if (
        name in VARYING
        and torch.are_deterministic_algorithms_enabled()
        and cards[0].is_floating_point()
    ):
        raise RuntimeError(f"{func} does not have a deterministic implementation")
    if name in WAITING or func is aten.repeat_interleave.Tensor:
        machine.wait("read")
    if name in MULTIPLYING:
        machine.products[_product_type(cards[0].dtype), _place()] += 1
    most = machine.card.most_sequences
    if most is not None and name is aten.embedding and args[1].dim() == 2 and len(args[1]) > most:
        raise _out_of_memory()
    hosts, named = _convert([args, list(kwargs.values())], CudaTensor, _host)
    with (
        machine.random()
        if torch.Tag.nondeterministic_seeded in func.tags
        else contextlib.nullcontext()
    ):
        out = func(*hosts, **dict(zip(kwargs, named, strict=True)))
    if name in WATCHED:
        made = next(value for value in (out, *cards) if isinstance(value, Tensor))
        machine.watched[f"{name.__name__} {_named(made.dtype)}", _place()] += 1
    if not on_card:
        return out
    given = {id(card.host): card for card in cards}  # what works in place returns what it was given
    return _convert(
        out, Tensor, lambda host: given[id(host)] if id(host) in given else CudaTensor(host)
    )


def _convert(value: Any, kind: type, how: Callable) -> Any:
    """Return ``value`` with ``how`` of each ``kind`` in it, also within lists."""
    if isinstance(value, kind):
        return how(value)
    return (
        type(value)(_convert(item, kind, how) for item in value)
        if type(value) in (list, tuple)
        else value
    )


def _host(tensor: CudaTensor) -> Tensor:
    return tensor.host


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _product_type(dtype: torch.dtype) -> str:
    """Return what a product's factors are rounded to."""
    allowed = (
        torch.get_float32_matmul_precision() != "highest" and machine.card.capability >= AMPERE
    )
    return "tf32" if dtype == torch.float32 and allowed else _named(dtype)


def _check_one_side(func: torch._ops.OpOverload, args: tuple, others: list[Tensor]) -> None:
    """Raise RuntimeError as a card does for ``others``, the CPU's tensors, unless the operation takes them."""
    if func.overloadpacket in INDEXING and isinstance(args[0], CudaTensor):
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            machine.wait("read")
        elif others:
            machine.wait("write")  # it moves indices to the card by itself
        others = [tensor for tensor in others if all(tensor is not index for index in indices)]
    written = func._schema.is_mutable and any(args[0] is tensor for tensor in others)
    if torch.Tag.pointwise in func.tags and not written:  # where a number may be on either side
        others = [tensor for tensor in others if tensor.dim()]
    if others:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func})"
        )


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(source, CudaTensor) and not isinstance(to, CudaTensor):
        return machine.download(source.host, to, non_blocking)
    if isinstance(to, CudaTensor) and not isinstance(source, CudaTensor):
        _upload(source, non_blocking)
    getattr(to, "host", to).copy_(getattr(source, "host", source))
    return to


def _upload(host: Tensor, non_blocking: bool) -> None:
    if not (
        non_blocking and machine.is_pinned(host)
    ):  # from pageable memory the host waits all the same
        machine.wait("write")


def _move(func: torch._ops.OpOverload, tensor: Tensor, kwargs: dict) -> Tensor:
    """Return a copy on the other side."""
    non_blocking = kwargs.get("non_blocking", False)
    if not isinstance(tensor, CudaTensor):
        _upload(tensor, non_blocking)
        return CudaTensor(func(tensor, **kwargs))
    out = func(tensor.host, **kwargs)
    if out.device == CPU:
        machine.download(tensor.host, machine.pin(out) if non_blocking else out, non_blocking)
    return out


# ---- attention


@functools.wraps(attend)
def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args, **kwargs
) -> Tensor:
    """Note the kernel that a card would have taken, and have PyTorch compute attention by its definition."""
    if isinstance(query, CudaTensor):
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        kernel = _kernel(query, attn_mask)
        machine.kernels[kernel, _place()] += 1
        with torch.profiler.record_function(f"aten::_scaled_dot_product_{kernel}_attention"):
            pass
    return attend(query, key, value, attn_mask, *args, **kwargs)


def _kernel(query: Tensor, mask: Tensor | None) -> str:
    """Return the kernel that PyTorch would take: its sdp_utils.cpp, in short. Raises RuntimeError where none may run."""
    capability, settings = machine.card.capability, torch.backends.cuda
    modern, half = capability >= AMPERE, query.dtype in (torch.float16, torch.bfloat16)
    able = {
        "flash": settings.flash_sdp_enabled()
        and modern
        and half
        and mask is None
        and query.shape[-1] <= 256,
        "efficient": settings.mem_efficient_sdp_enabled()
        and (modern or query.dtype != torch.bfloat16),
        "math": settings.math_sdp_enabled(),
        "cudnn": settings.cudnn_sdp_enabled()
        and modern
        and half
        and not torch.are_deterministic_algorithms_enabled(),
    }
    if not any(able.values()):
        raise RuntimeError("No available kernel. Aborting execution.")
    order = ["cudnn", *able] if capability[0] in (9, 10) else able
    return next(name for name in order if able[name])


# ---- what torch.cuda and NVML are asked


def _ordinal(index: int) -> int:
    if not 0 <= index < machine.card.count:
        raise RuntimeError("CUDA error: invalid device ordinal")
    return index


def _initialize() -> None:
    machine.allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get(
        "PYTORCH_ALLOC_CONF", ""
    )
    torch.cuda.default_generators = (machine.generator,) * machine.card.count


def _properties(index: int) -> types.SimpleNamespace:
    card, (major, minor) = machine.card, machine.card.capability
    return types.SimpleNamespace(name=card.name, major=major, minor=minor, total_memory=card.memory)


def _memory_stats(index: int) -> dict:
    bytes_of = {
        "allocated": (machine.allocated, machine.peak),
        "reserved": (machine.reserved, machine.reserved),
    }
    return {
        f"{name}_bytes": {"all": {"current": now, "peak": most}}
        for name, (now, most) in bytes_of.items()
    }


def _free_memory(index: int) -> tuple[int, int]:
    return machine.card.memory - machine.reserved - machine.others, machine.card.memory


def _empty_cache() -> None:
    machine.emptied += 1
    machine.reserved = machine.allocated


C_FUNCTIONS = {
    "_cuda_init": _initialize,
    "_cuda_getDeviceCount": lambda: machine.card.count,
    "_cuda_getDevice": lambda: machine.device.index,
    "_cuda_setDevice": lambda index: setattr(
        machine, "device", torch.device("cuda", _ordinal(index))
    ),
    "_cuda_synchronize": lambda: machine.wait("synchronize"),
    "_cuda_memoryStats": _memory_stats,
    "_cuda_setMemoryFraction": lambda fraction, index: setattr(machine, "fraction", fraction),
    "_cuda_resetPeakMemoryStats": lambda index: setattr(machine, "peak", machine.allocated),
    "_cuda_emptyCache": _empty_cache,
    "_cuda_getArchFlags": lambda: "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120",
    "_cuda_getCurrentRawStream": None,  # the compiler imports it
}
NVML_FUNCTIONS = {
    "nvmlInit": lambda: None,
    "nvmlDeviceGetHandleByIndex": _ordinal,
    "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=97),
    "nvmlDeviceGetPowerUsage": lambda handle: 287_500,  # mW
    "NVMLError_DriverNotLoaded": type("NVMLError_DriverNotLoaded", (Exception,), {}),
}


def _compile(model: Any, **how) -> Any:
    """Note the arguments, and compile nothing."""
    machine.compiled.append(how)
    if isinstance(
        model, nn.Module
    ):  # a compiled forward pass asks no values of a mask: each would be a wait
        tracing = mock.patch.object(masking_utils, "is_tracing", lambda tensor=None: True)
        model.forward = tracing(model.forward)
    return model


def _profile() -> Callable:
    """Return a beginning of torch.profiler.profile that leaves the card out, of which a CPU build cannot record."""
    real = torch.profiler.profile.__init__

    def begin(self, *, activities: Iterable | None = None, **kwargs) -> None:
        machine.profiled += [activity.name for activity in activities or ()]
        cpu = [
            activity
            for activity in activities or ()
            if activity != torch.profiler.ProfilerActivity.CUDA
        ]
        real(self, activities=cpu or None, **kwargs)

    return begin


# ---- several cards


def _join() -> Callable:
    """Return a torch.distributed.init_process_group that has gloo where NCCL is asked for."""
    real = dist.init_process_group
    signature = inspect.signature(real)

    def join(*args, **kwargs) -> None:
        given = signature.bind(*args, **kwargs).arguments
        machine.backend = given.get("backend")
        real(
            **given | ({"backend": "gloo", "device_id": None} if machine.backend == "nccl" else {})
        )

    return join


class DataParallel(nn.Module):
    """DistributedDataParallel, whose C++ knows no tensors of ours: gradients are averaged as each becomes whole."""

    signature = inspect.signature(nn.parallel.DistributedDataParallel)

    def __init__(self, *args, **kwargs):
        super().__init__()
        machine.wrapped = self.signature.bind(*args, **kwargs).arguments
        self.module, self.wanted = machine.wrapped.pop("module"), True
        for parameter in self.module.parameters():
            dist.broadcast(parameter.detach(), 0)
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter: nn.Parameter) -> None:
        if self.wanted:
            machine.exchanged += parameter.nbytes
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def forward(self, *args, **kwargs) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.wanted = False
        try:
            yield
        finally:
            self.wanted = True


def simulate(card: GpuModel) -> Machine:
    """Make this process one that has ``card``; return what becomes known of it from here on."""
    global machine
    machine = Machine(card)
    for name, function in list(vars(torch._C).items()):  # of a CUDA build
        if name.startswith("_cuda_") and isinstance(function, types.BuiltinFunctionType):
            delattr(torch._C, name)
    for name, function in C_FUNCTIONS.items():
        setattr(torch._C, name, function)
    torch.cuda._get_device_properties = _properties
    torch.cuda._cudart = types.SimpleNamespace(cudaMemGetInfo=_free_memory)
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = lambda index: max(index, 0)
    torch.cuda._is_in_bad_fork = torch.cuda.graphs._cuda_isCurrentStreamCapturing = lambda: False
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.accelerator.current_stream = lambda device=None: types.SimpleNamespace(
        is_capturing=lambda: False
    )
    torch.version.cuda = "13.0"
    sys.modules["pynvml"] = torch.cuda.pynvml = types.ModuleType("pynvml")
    vars(torch.cuda.pynvml).update(NVML_FUNCTIONS)
    torch.cuda._HAS_PYNVML = True

    _guard()
    torch._C._set_only_lift_cpu_tensors(
        True
    )  # torch.tensor makes its values on the CPU and moves them
    torch.__future__.set_swap_module_params_on_conversion(
        True
    )  # Module.to would set .data of others
    torch.autograd.set_multithreading_enabled(False)
    F.scaled_dot_product_attention = _attention
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(
        True
    )  # by its definition, in half precision
    dist.init_process_group = torch.distributed.distributed_c10d.init_process_group = _join()
    nn.parallel.DistributedDataParallel = DataParallel
    _foreach_utils._foreach_supported_types.append(CudaTensor)  # as the plain tensors of a card are
    torch.profiler.profile.__init__ = _profile()
    torch.compile, hardware.has_triton_package, hardware.kernel_driver = (
        _compile,
        lambda: True,
        lambda: "580.1",
    )
    _Making().__enter__()
    return machine


def _guard() -> None:
    """Give CUDA and XLA, of which a CPU build knows nothing, device guards of PyTorch's that do nothing.

    PyTorch makes CUDA's itself, in the place of one that has no devices, as that of lazy tensors.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 18).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, xla, meta, lazy = 1, 9, 14, 17  # of c10::DeviceType
    guards[cuda] = guards[lazy]
    torch._C._ensureCUDADeviceGuardSet()
    guards[xla] = guards[meta]


def run_on_gpu(card: GpuModel, work: Callable[[Machine], None]) -> None:
    """Call ``work`` in a fork that has the card; what it raises fails the test."""

    def call() -> None:
        work(simulate(card))

    run_in_fork(call)
