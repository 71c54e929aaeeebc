"""Simulate NVIDIA GPUs with a CPU build of PyTorch, so that code for GPUs is tested without one.

``simulate(A6000)`` changes the process permanently. Call it only in a process that ends with the
test, a fork or a child. ``run_on_gpu`` does that.

The simulation finds:

- a tensor on the wrong device
- a torch.cuda function that is called with wrong arguments or is not simulated here
- each place where the host waits for the GPU
- host memory that is read while an asynchronous copy is in progress
- running out of memory
- with several GPUs, one per process: the backend, the arguments of DDP, and how often gradients are
  exchanged

It cannot find errors in kernels (it computes on the CPU), in the compiler, in sharding or in
speed.

How it works:

- A tensor of the GPU is a ``CudaTensor``. It contains a CPU tensor and reports the device cuda:0.
- A dispatch mode passes every operation to ``_operate``, below autograd and autocast. ``_operate``
  checks the devices and computes on the CPU.
- For C++, such a tensor is an XLA tensor: a device for which a CPU build needs no streams, and to
  which CUDA's autocast applies.
- torch.cuda remains PyTorch's own Python code, with its signatures and checks. The C functions that
  it calls do not exist in a CPU build. They are replaced here, and any other one raises
  AttributeError.
- NCCL is replaced by gloo, which exchanges the CPU tensors.
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
from typing import Any, NamedTuple
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

REPOSITORY = str(Path(__file__).resolve().parents[2])
PACKAGE = os.path.join(REPOSITORY, "ursa_minor")
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
XLA = torch.device("xla", 0)
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
Tensor = torch.Tensor
aten = torch.ops.aten
real_attention = F.scaled_dot_product_attention


@dataclass(frozen=True)
class GpuModel:
    """The properties of a GPU to simulate.

    Attributes:
        name: The name that the driver reports.
        capability: Compute capability.
        memory: Memory in bytes.
        most_sequences: Maximum size of a micro-batch, or None. A larger one runs out of memory.
        count: Number of GPUs in the machine, all of the same model.
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


class CudaTensor(Tensor):
    """A tensor of the GPU. ``host`` is the CPU tensor with its values, in the same memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: gpu.device)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @staticmethod
    def __new__(cls, host: Tensor) -> "CudaTensor":
        tensor = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=XLA,
            _extra_dispatch_keys=AUTOCAST,
        )
        tensor.host = host
        tensor.block = gpu.allocate(host.untyped_storage())
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, kinds, args=(), kwargs=None):
        return _operate(func, args, kwargs or {})

    def get_device(self) -> int:
        return gpu.device.index

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()


class _FactoryMode(TorchDispatchMode):
    """Pass operations without a GPU tensor to ``_operate`` too, because they may create one."""

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        return _operate(func, args, kwargs or {})


class _Block:
    """A block of GPU memory. It is freed when no tensor uses it any more."""

    def __init__(self, size: int):
        self.size = size
        gpu.allocated += size
        gpu.peak = max(gpu.peak, gpu.allocated)
        gpu.reserved = max(gpu.reserved, gpu.allocated)

    def __del__(self):
        if gpu is not None:  # None while the interpreter shuts down
            gpu.allocated -= self.size


class SimulatedGpu:
    """The GPU of this process: its memory, its copies in progress, and a record of its use.

    The counters have keys (what, place), where ``place`` is the function of the product that was
    running, as "file.function".

    Attributes:
        model: The simulated model.
        device: Which GPU of the machine it is.
        backend: The backend that was requested for the process group.
        ddp_arguments: The arguments of DistributedDataParallel.
        exchanged_bytes: Bytes of gradients that were exchanged.
        waits: How often the host waited. "what" is "read", "write" or "synchronize".
        kernels: The attention kernels that a real GPU would have run.
        products: The data types of matrix products, tf32 included.
        watched: Operations in ``WATCHED``, each with the data type that it computes.
        compile_calls: The arguments of each call of torch.compile.
        allocator_settings: Settings at CUDA's initialization. Later ones have no effect.
        cache_clears: How often unused memory was returned.
        profiled_activities: The activities that profilers should record.
        allocated, peak, reserved: Memory in bytes.
        used_by_others: Bytes that other programs occupy.
        memory_fraction: Share of the GPU's memory that this process may use.
    """

    def __init__(self, model: GpuModel):
        self.model = model
        self.device = CUDA
        self.backend: str | None = None
        self.ddp_arguments: dict = {}
        self.exchanged_bytes = 0
        self.waits = Counter()
        self.kernels = Counter()
        self.products = Counter()
        self.watched = Counter()
        self.compile_calls: list[dict] = []
        self.allocator_settings: str | None = None
        self.cache_clears = 0
        self.profiled_activities: list[str] = []
        self.allocated = 0
        self.peak = 0
        self.reserved = 0
        self.used_by_others = 0
        self.memory_fraction = 1.0
        self.generator = torch.Generator()
        self._blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()
        # A reference to each storage is kept, so that its address is not used again.
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._downloads: list[tuple[Tensor, Tensor]] = []

    def allocate(self, storage: torch.UntypedStorage) -> _Block:
        """Return the block of GPU memory for a storage. Views share one block."""
        block = self._blocks.get(storage._cdata)
        if block is None:
            if self.allocated + storage.nbytes() > self.memory_fraction * self.model.memory:
                raise _out_of_memory()
            block = _Block(storage.nbytes())
            self._blocks[storage._cdata] = block
        return block

    def wait(self, what: str) -> None:
        """Make the host wait until all copies are complete."""
        self.waits[what, _place()] += 1
        downloads = self._downloads
        self._downloads = []
        for host, values in downloads:
            host.copy_(values)

    def pin(self, host: Tensor) -> Tensor:
        """Mark the memory of a CPU tensor as pinned."""
        storage = host.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return host

    def is_pinned(self, host: Tensor) -> bool:
        """Return whether a CPU tensor is in pinned memory."""
        return host.untyped_storage().data_ptr() in self._pinned

    def download(self, values: Tensor, host: Tensor, non_blocking: bool) -> Tensor:
        """Copy values to a CPU tensor.

        A non-blocking copy to pinned memory is complete only after the host has waited. Until then
        the tensor contains NaN or -1.
        """
        if non_blocking and self.is_pinned(host):
            self._downloads.append((host, values.to(host.dtype, copy=True)))
            placeholder = float("nan") if host.is_floating_point() else -1
            return host.fill_(placeholder)
        self.wait("read")
        return host.copy_(values)

    @contextlib.contextmanager
    def random(self) -> Iterator[None]:
        """Draw from the GPU's generator inside the block, and keep the CPU's state unchanged."""
        cpu_state = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(cpu_state)


gpu: SimulatedGpu | None = None  # simulate() sets it


def _out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB on GPU 0.")


def _place() -> str:
    """Return the innermost running function of the product as "file.function"."""
    frame = sys._getframe(1)
    while frame is not None:
        folder, file = os.path.split(frame.f_code.co_filename)
        if folder == REPOSITORY or folder.startswith(PACKAGE):
            module = file.removesuffix(".py")
            function = frame.f_code.co_qualname.partition(".<locals>")[0]
            return f"{module}.{function}"
        frame = frame.f_back
    return "elsewhere"


# Operations

# The result of these operations, or its size, is needed on the host.
WAITING = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.bincount,
    aten.equal,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
}
INDEXING = {aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_}
MULTIPLYING = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
# The product chooses the data type of these, or whether they are used.
WATCHED = {
    aten._fused_adamw_,
    aten._log_softmax,
    aten.exp_,
    aten.linalg_vector_norm,
    aten.logsumexp,
}
# The operations of language models that have no deterministic implementation on a GPU.
NONDETERMINISTIC = {aten.cumsum, aten.kthvalue, aten.histc, aten.median, aten.put_}


class _Call(NamedTuple):
    """A dispatched operation with its arguments.

    Attributes:
        func: The operation.
        args: Its positional arguments.
        kwargs: Its keyword arguments. A GPU as the device is replaced by the CPU.
        gpu_tensors: The arguments that are GPU tensors, also those inside lists.
        cpu_tensors: The arguments that are CPU tensors.
        on_gpu: Whether the result is on the GPU.
    """

    func: torch._ops.OpOverload
    args: tuple
    kwargs: dict
    gpu_tensors: list[CudaTensor]
    cpu_tensors: list[Tensor]
    on_gpu: bool

    @property
    def name(self) -> torch._ops.OpOverloadPacket:
        return self.func.overloadpacket


def _describe_call(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> _Call:
    gpu_tensors = []
    cpu_tensors = []
    for value in arg_tree_leaves(*args, **kwargs):
        if isinstance(value, CudaTensor):
            gpu_tensors.append(value)
        elif isinstance(value, Tensor):
            cpu_tensors.append(value)

    device = kwargs.get("device")
    if device is None:
        on_gpu = bool(gpu_tensors)
    else:
        on_gpu = device.type == "cuda" or device == XLA
        if on_gpu:
            _check_device_index(device)
            kwargs = kwargs | {"device": CPU}
    return _Call(func, args, kwargs, gpu_tensors, cpu_tensors, on_gpu)


def _check_device_index(device: torch.device) -> None:
    if device.type == "cuda" and device.index not in (None, gpu.device.index):
        raise RuntimeError(f"CUDA error: {device} is not the GPU of this process, {gpu.device}")


def _operate(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """Check the devices of an operation, record its use of the GPU, and compute on the CPU."""
    if torch.is_inference_mode_enabled():
        # In inference mode, composite operations arrive here before they are decomposed.
        with _FactoryMode():
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result

    call = _describe_call(func, args, kwargs)
    if call.name is aten.is_pinned:
        return not call.gpu_tensors and gpu.is_pinned(args[0])
    if call.name is aten._pin_memory:
        return gpu.pin(args[0].clone())
    if call.name is aten.copy_:
        return _copy(*args, **call.kwargs)
    if not call.gpu_tensors and not call.on_gpu:
        return _compute_on_cpu(func, args, call.kwargs)
    if call.name is aten._to_copy and bool(call.gpu_tensors) != call.on_gpu:
        return _move(func, args[0], call.kwargs)
    return _compute_on_gpu(call)


def _compute_on_cpu(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    if not kwargs.get("pin_memory"):
        return func(*args, **kwargs)
    result = func(*args, **kwargs | {"pin_memory": False})
    return gpu.pin(result)


def _compute_on_gpu(call: _Call) -> Any:
    """Check and record an operation of the GPU, and compute it with the CPU tensors."""
    _check_supported(call)
    if call.cpu_tensors or call.name in INDEXING:
        _check_same_device(call)
    _check_deterministic(call)
    if call.name in WAITING or call.func is aten.repeat_interleave.Tensor:
        gpu.wait("read")
    if call.name in MULTIPLYING:
        gpu.products[_product_type(call.gpu_tensors[0].dtype), _place()] += 1
    _check_batch_size(call)

    result = _compute_with_hosts(call)

    if call.name in WATCHED:
        _record_watched(call, result)
    if not call.on_gpu:
        return result
    # An in-place operation returns the tensor that it was given.
    arguments = {id(tensor.host): tensor for tensor in call.gpu_tensors}

    def wrap(host: Tensor) -> CudaTensor:
        if id(host) in arguments:
            return arguments[id(host)]
        return CudaTensor(host)

    return _convert(result, Tensor, wrap)


def _check_supported(call: _Call) -> None:
    changes_shape = torch.Tag.inplace_view in call.func.tags and call.name is not aten.detach_
    if changes_shape or call.name in (aten.set_, aten.resize_):
        raise NotImplementedError(
            f"simulated_cuda does not support shape changes in place: {call.func}"
        )
    if call.kwargs.get("generator") is not None:  # a GPU generator cannot be created here
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")


def _check_same_device(call: _Call) -> None:
    """Raise the RuntimeError of a GPU if the operation does not accept its CPU tensors."""
    cpu_tensors = call.cpu_tensors
    if call.name in INDEXING and isinstance(call.args[0], CudaTensor):
        indices = [index for index in call.args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            gpu.wait("read")
        elif cpu_tensors:
            gpu.wait("write")  # PyTorch moves indices to the GPU automatically
        cpu_tensors = _without(cpu_tensors, indices)

    # A number may be on either device as an operand of a pointwise operation.
    is_written = call.func._schema.is_mutable and bool(_with(cpu_tensors, call.args[0]))
    if torch.Tag.pointwise in call.func.tags and not is_written:
        cpu_tensors = [tensor for tensor in cpu_tensors if tensor.dim()]
    if cpu_tensors:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:0 and cpu! ({call.func})"
        )


def _with(tensors: list[Tensor], wanted: Any) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is wanted]


def _without(tensors: list[Tensor], excluded: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if not _with(excluded, tensor)]


def _check_deterministic(call: _Call) -> None:
    if call.name not in NONDETERMINISTIC or not torch.are_deterministic_algorithms_enabled():
        return
    if call.gpu_tensors[0].is_floating_point():
        raise RuntimeError(f"{call.func} does not have a deterministic implementation")


def _check_batch_size(call: _Call) -> None:
    """Run out of memory if a batch has more sequences than the simulated model allows."""
    limit = gpu.model.most_sequences
    if limit is None or call.name is not aten.embedding:
        return
    ids = call.args[1]
    if ids.dim() == 2 and len(ids) > limit:
        raise _out_of_memory()


def _compute_with_hosts(call: _Call) -> Any:
    hosts, values = _convert([call.args, list(call.kwargs.values())], CudaTensor, _host)
    kwargs = dict(zip(call.kwargs, values, strict=True))
    if torch.Tag.nondeterministic_seeded in call.func.tags:
        with gpu.random():
            return call.func(*hosts, **kwargs)
    return call.func(*hosts, **kwargs)


def _record_watched(call: _Call, result: Any) -> None:
    computed = result if isinstance(result, Tensor) else call.gpu_tensors[0]
    gpu.watched[f"{call.name.__name__} {_dtype_name(computed.dtype)}", _place()] += 1


def _convert(value: Any, kind: type, function: Callable) -> Any:
    """Return ``value`` with ``function`` applied to each ``kind`` in it, also inside lists."""
    if isinstance(value, kind):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(_convert(item, kind, function) for item in value)
    return value


def _host(tensor: CudaTensor) -> Tensor:
    return tensor.host


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _product_type(dtype: torch.dtype) -> str:
    """Return the data type to which the factors of a matrix product are rounded."""
    tf32_requested = torch.get_float32_matmul_precision() != "highest"
    if dtype == torch.float32 and tf32_requested and gpu.model.capability >= AMPERE:
        return "tf32"
    return _dtype_name(dtype)


# Copies


def _copy(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(source, CudaTensor) and not isinstance(destination, CudaTensor):
        return gpu.download(source.host, destination, non_blocking)
    if isinstance(destination, CudaTensor) and not isinstance(source, CudaTensor):
        _upload(source, non_blocking)
    destination_host = getattr(destination, "host", destination)
    source_host = getattr(source, "host", source)
    destination_host.copy_(source_host)
    return destination


def _upload(host: Tensor, non_blocking: bool) -> None:
    # The host always waits for a copy from pageable memory.
    if not (non_blocking and gpu.is_pinned(host)):
        gpu.wait("write")


def _move(func: torch._ops.OpOverload, tensor: Tensor, kwargs: dict) -> Tensor:
    """Return a copy on the other device."""
    non_blocking = kwargs.get("non_blocking", False)
    if not isinstance(tensor, CudaTensor):
        _upload(tensor, non_blocking)
        return CudaTensor(func(tensor, **kwargs))
    result = func(tensor.host, **kwargs)
    if result.device == CPU:
        if non_blocking:
            gpu.pin(result)
        gpu.download(tensor.host, result, non_blocking)
    return result


# Attention


@functools.wraps(real_attention)
def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args, **kwargs
) -> Tensor:
    """Record the kernel that a GPU would have run, and compute attention by its definition."""
    if isinstance(query, CudaTensor):
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query = query.to(dtype)
            key = key.to(dtype)
            value = value.to(dtype)
        kernel = _attention_kernel(query, attn_mask)
        gpu.kernels[kernel, _place()] += 1
        with torch.profiler.record_function(f"aten::_scaled_dot_product_{kernel}_attention"):
            pass
    return real_attention(query, key, value, attn_mask, *args, **kwargs)


def _attention_kernel(query: Tensor, mask: Tensor | None) -> str:
    """Return the kernel that PyTorch would select. The rules are a summary of its sdp_utils.cpp.

    Raises:
        RuntimeError: No enabled kernel supports these arguments.
    """
    settings = torch.backends.cuda
    capability = gpu.model.capability
    is_ampere = capability >= AMPERE
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    is_tensor_core = is_ampere and is_half
    is_deterministic = torch.are_deterministic_algorithms_enabled()

    flash_supported = is_tensor_core and mask is None and query.shape[-1] <= 256
    efficient_supported = is_ampere or query.dtype != torch.bfloat16
    cudnn_supported = is_tensor_core and not is_deterministic
    supported = {
        "flash": settings.flash_sdp_enabled() and flash_supported,
        "efficient": settings.mem_efficient_sdp_enabled() and efficient_supported,
        "math": settings.math_sdp_enabled(),
        "cudnn": settings.cudnn_sdp_enabled() and cudnn_supported,
    }

    order = ["flash", "efficient", "math", "cudnn"]
    if capability[0] in (9, 10):
        order = ["cudnn", "flash", "efficient", "math"]
    for name in order:
        if supported[name]:
            return name
    raise RuntimeError("No available kernel. Aborting execution.")


# Functions of torch.cuda and NVML


def _ordinal(index: int) -> int:
    if not 0 <= index < gpu.model.count:
        raise RuntimeError("CUDA error: invalid device ordinal")
    return index


def _initialize() -> None:
    old_variable = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    new_variable = os.environ.get("PYTORCH_ALLOC_CONF", "")
    gpu.allocator_settings = old_variable + new_variable
    torch.cuda.default_generators = (gpu.generator,) * gpu.model.count


def _set_device(index: int) -> None:
    gpu.device = torch.device("cuda", _ordinal(index))


def _set_memory_fraction(fraction: float, index: int) -> None:
    gpu.memory_fraction = fraction


def _reset_peak(index: int) -> None:
    gpu.peak = gpu.allocated


def _properties(index: int) -> types.SimpleNamespace:
    major, minor = gpu.model.capability
    return types.SimpleNamespace(
        name=gpu.model.name, major=major, minor=minor, total_memory=gpu.model.memory
    )


def _memory_stats(index: int) -> dict:
    return {
        "allocated_bytes": {"all": {"current": gpu.allocated, "peak": gpu.peak}},
        "reserved_bytes": {"all": {"current": gpu.reserved, "peak": gpu.reserved}},
    }


def _free_and_total_memory(index: int) -> tuple[int, int]:
    free = gpu.model.memory - gpu.reserved - gpu.used_by_others
    return free, gpu.model.memory


def _empty_cache() -> None:
    gpu.cache_clears += 1
    gpu.reserved = gpu.allocated


C_FUNCTIONS = {
    "_cuda_init": _initialize,
    "_cuda_getDeviceCount": lambda: gpu.model.count,
    "_cuda_getDevice": lambda: gpu.device.index,
    "_cuda_setDevice": _set_device,
    "_cuda_synchronize": lambda: gpu.wait("synchronize"),
    "_cuda_memoryStats": _memory_stats,
    "_cuda_setMemoryFraction": _set_memory_fraction,
    "_cuda_resetPeakMemoryStats": _reset_peak,
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


def _compile(model: Any, **kwargs) -> Any:
    """Record the arguments, and compile nothing."""
    gpu.compile_calls.append(kwargs)
    if isinstance(model, nn.Module):
        # While tracing, Transformers does not read the values of a mask. Each read would be a wait.
        tracing = mock.patch.object(masking_utils, "is_tracing", lambda tensor=None: True)
        model.forward = tracing(model.forward)
    return model


def _profiler_init() -> Callable:
    """Return a torch.profiler.profile.__init__ without CUDA, which a CPU build cannot record."""
    real_init = torch.profiler.profile.__init__

    def init(self, *, activities: Iterable | None = None, **kwargs) -> None:
        cpu_activities = []
        for activity in activities or ():
            gpu.profiled_activities.append(activity.name)
            if activity != torch.profiler.ProfilerActivity.CUDA:
                cpu_activities.append(activity)
        real_init(self, activities=cpu_activities or None, **kwargs)

    return init


# Several GPUs


def _process_group_init() -> Callable:
    """Return a torch.distributed.init_process_group that uses gloo instead of NCCL."""
    real_init = dist.init_process_group
    signature = inspect.signature(real_init)

    def init_process_group(*args, **kwargs) -> None:
        arguments = signature.bind(*args, **kwargs).arguments
        gpu.backend = arguments.get("backend")
        if gpu.backend == "nccl":
            arguments = arguments | {"backend": "gloo", "device_id": None}
        real_init(**arguments)

    return init_process_group


class DataParallel(nn.Module):
    """A DistributedDataParallel that averages each gradient as soon as it is complete.

    The C++ code of PyTorch's own class does not support ``CudaTensor``.
    """

    signature = inspect.signature(nn.parallel.DistributedDataParallel)

    def __init__(self, *args, **kwargs):
        super().__init__()
        gpu.ddp_arguments = self.signature.bind(*args, **kwargs).arguments
        self.module = gpu.ddp_arguments.pop("module")
        self.sync_gradients = True
        for parameter in self.module.parameters():
            dist.broadcast(parameter.detach(), 0)
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter: nn.Parameter) -> None:
        if self.sync_gradients:
            gpu.exchanged_bytes += parameter.nbytes
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def forward(self, *args, **kwargs) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sync_gradients = False
        try:
            yield
        finally:
            self.sync_gradients = True


# The simulation


def simulate(model: GpuModel) -> SimulatedGpu:
    """Give this process a simulated GPU. Return the object that records its use."""
    global gpu
    gpu = SimulatedGpu(model)
    # A fork replaces PyTorch's thread pool at its first use. It must not be used first by two of
    # autograd's threads at the same time: one of them would find no pool.
    torch.set_num_threads(1)
    _replace_c_functions()
    _replace_torch_cuda()
    _replace_nvml()
    _replace_device_guards()
    _adapt_tensor_operations()
    _replace_attention()
    _replace_distributed()
    torch.profiler.profile.__init__ = _profiler_init()
    torch.compile = _compile
    hardware.has_triton_package = lambda: True
    hardware.kernel_driver = lambda: "580.1"
    _FactoryMode().__enter__()
    return gpu


def _replace_c_functions() -> None:
    for name, function in list(vars(torch._C).items()):
        # These functions exist only in a CUDA build.
        if name.startswith("_cuda_") and isinstance(function, types.BuiltinFunctionType):
            delattr(torch._C, name)
    for name, function in C_FUNCTIONS.items():
        setattr(torch._C, name, function)


def _replace_torch_cuda() -> None:
    torch.version.cuda = "13.0"
    torch.cuda._get_device_properties = _properties
    torch.cuda._cudart = types.SimpleNamespace(cudaMemGetInfo=_free_and_total_memory)
    torch.cuda._exchange_device = lambda index: max(index, 0)
    torch.cuda._maybe_exchange_device = torch.cuda._exchange_device
    torch.cuda._is_in_bad_fork = lambda: False
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = lambda: False

    def current_accelerator(check_available: bool = False) -> torch.device:
        return torch.device("cuda")

    def current_stream(device: torch.device | None = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(is_capturing=lambda: False)

    torch.accelerator.current_accelerator = current_accelerator
    torch.accelerator.current_stream = current_stream


def _replace_nvml() -> None:
    pynvml = types.ModuleType("pynvml")
    vars(pynvml).update(NVML_FUNCTIONS)
    sys.modules["pynvml"] = pynvml
    torch.cuda.pynvml = pynvml
    torch.cuda._HAS_PYNVML = True


def _replace_device_guards() -> None:
    """Give CUDA and XLA, which a CPU build does not support, device guards that do nothing.

    PyTorch creates the guard of CUDA itself if it finds one without devices there, such as that of
    lazy tensors.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = "_ZN3c104impl26device_guard_impl_registryE"
    guards = (ctypes.c_void_p * 18).in_dll(library, registry)
    # Values of the enumeration c10::DeviceType.
    cuda = 1
    xla = 9
    meta = 14
    lazy = 17
    guards[cuda] = guards[lazy]
    torch._C._ensureCUDADeviceGuardSet()
    guards[xla] = guards[meta]


def _adapt_tensor_operations() -> None:
    # torch.tensor creates its values on the CPU and moves them.
    torch._C._set_only_lift_cpu_tensors(True)
    # Otherwise Module.to would assign .data of a tensor of another type.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.autograd.set_multithreading_enabled(False)
    # As for the plain tensors of a real GPU.
    _foreach_utils._foreach_supported_types.append(CudaTensor)


def _replace_attention() -> None:
    F.scaled_dot_product_attention = _attention
    # Compute attention by its definition in half precision.
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)


def _replace_distributed() -> None:
    init_process_group = _process_group_init()
    dist.init_process_group = init_process_group
    torch.distributed.distributed_c10d.init_process_group = init_process_group
    nn.parallel.DistributedDataParallel = DataParallel


def run_on_gpu(model: GpuModel, work: Callable[[SimulatedGpu], None]) -> None:
    """Call ``work`` in a fork with a simulated GPU. An exception in it fails the test."""

    def call() -> None:
        work(simulate(model))

    run_in_fork(call)
