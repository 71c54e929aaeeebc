"""An ordinary CPU build of torch passes for NVIDIA cards, so that lines which only a card reaches are run without one.

``pretend(A6000)`` changes the process for good: call it in one that is thrown away (a fork, a child).

What it finds: a tensor on the wrong side, a torch.cuda function that is called wrongly or is not answered here, each place
where the host waits for the card, host memory that is read or overwritten while a copy is under way, memory that runs out.
Of several cards, one a process: which backend is asked for, what DDP and FSDP2 wrap, how often and in what type gradients
are exchanged. What it cannot find: anything of kernels (it computes on the CPU), of the compiler, of speed, of shards
(FSDP2 leaves each weight whole here, and exchanges gradients as DDP does).

How: a tensor of the card is a ``CudaTensor``. It holds a CPU tensor, says that it is on cuda:0, and every operation on it
arrives in ``_operate``, below autograd and autocast, which checks the sides and computes on the CPU. Only what asks for the
device in C++ is replaced: functions that make tensors, the moves between the sides, attention, the kernels of autocast.
torch.cuda stays PyTorch's own Python, with its signatures and checks; the C functions beneath it, which a CPU build lacks,
are answered here, and any other raises AttributeError. NCCL is gloo, between the CPU tensors.
"""

import contextlib
import functools
import inspect
import os
import re
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
import torch.distributed.fsdp as fsdp
import torch.nn.functional as F
from conftest import in_fork
from torch import nn
from torch.utils import _foreach_utils
from transformers import masking_utils

from pretrain.machine import hardware

PRODUCT = str(Path(__file__).resolve().parents[2])
CUDA = torch.device("cuda", 0)
aten, Tensor = torch.ops.aten, torch.Tensor
move_or_cast, attend = Tensor.to, F.scaled_dot_product_attention  # PyTorch's own


@dataclass(frozen=True)
class Card:
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


T4 = Card("Tesla T4", (7, 5), 15_642_329_088)
V100 = Card("Tesla V100-SXM2-16GB", (7, 0), 16_935_682_048)
RTX_3060 = Card("NVIDIA GeForce RTX 3060", (8, 6), 12_625_379_328)
A6000 = Card("NVIDIA RTX A6000", (8, 6), 51_033_931_776)
H200 = Card("NVIDIA H200", (9, 0), 150_109_880_320)
UNKNOWN = Card("NVIDIA Graphics Device", (12, 1), 20 * 2**30)
CARDS = (T4, V100, RTX_3060, A6000, H200, UNKNOWN)
WHEELS = {"12.6": "sm_70 sm_75 sm_80 sm_86 sm_90", "13.0": "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"}  # CUDA: its kernels
UTILIZATION, MILLIWATTS = 97, 287_500  # what NVML says of every card here


class CudaTensor(Tensor):
    """A tensor of the card; ``host`` is the CPU tensor with its values, in the same memory."""

    # C++ believes that it is on the CPU, for a CPU build has no streams and guards of CUDA for autograd to use; its
    # dispatch keys are CUDA's.
    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: machine.device)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @staticmethod
    def __new__(cls, host: Tensor) -> "CudaTensor":
        tensor = Tensor._make_subclass(cls, host, False, device_for_backend_keys=CUDA)
        tensor.host, tensor.block = host, machine.allocate(host.untyped_storage())
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, kinds, args=(), kwargs=None):
        return _operate(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise NotImplementedError("pretend_cuda: .data cannot be set, for the values would stay what they were")

    def get_device(self) -> int:
        return machine.device.index

    def numpy(self, *, force: bool = False):
        if not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host"
            )
        return self.detach().cpu().numpy()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"CudaTensor({self.host})"

    # A tensor with these two is exchanged whole by Module.to, which would set .data of others.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["host"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict, context: None, size: Any, stride: Any) -> "CudaTensor":
        return CudaTensor(inner["host"])


class _Block:
    """A piece of the card's memory, which is free when no tensor of it is left."""

    def __init__(self, size: int):
        self.size = size
        machine.allocated += size
        machine.peak = max(machine.peak, machine.allocated)
        machine.highest = max(machine.highest, machine.peak)
        machine.reserved = max(machine.reserved, machine.allocated)

    def __del__(self):
        if machine is not None:  # the interpreter ends
            machine.allocated -= self.size


class Machine:
    """The one card of this process: what is on it, what is on the way, and where the host has waited for it.

    Attributes:
        device: where it is among the machine's cards.
        backend: of the process group, as it was asked for.
        wrapped: what DDP and FSDP2 were given: the modules' class, and the arguments.
        exchanges: bytes of gradients, by exchange and type.
        has_met: whether the processes of a group know that each has a card of its own.
        waits: how often the host waited: (for "read", "write" or "synchronize", the product's function) to a count.
        kernels: (attention kernel that would have run, the product's function) to a count.
        products: (type of a matrix product, tf32 included, the product's function) to a count.
        watched: (an operation of ``WATCHED`` and the type that it computes, the product's function) to a count.
        compiled: the arguments of each torch.compile.
        allocator: its settings when CUDA was initialized; what is set later has no effect.
        emptied: how often unused memory was given back.
        profiled: the activities that a profiler was asked for.
        allocated, peak, reserved: bytes; highest: the peak, however often it was reset.
        others: bytes that other programs hold.
        fraction: of the card's memory that this process may take.
        exchanging: whether FSDP2's backward passes exchange gradients.
    """

    def __init__(self, card: Card):
        self.card = card
        self.waits, self.kernels, self.products, self.watched = Counter(), Counter(), Counter(), Counter()
        self.compiled: list[dict] = []
        self.profiled: list[str] = []
        self.device = CUDA
        self.backend: str | None = None
        self.wrapped: list[tuple[str, dict]] = []
        self.exchanges: Counter = Counter()
        self.has_met = True
        self.allocator: str | None = None
        self.allocated = self.peak = self.reserved = self.others = self.highest = self.emptied = 0
        self.fraction, self.exchanging = 1.0, True
        self.generator = torch.Generator()
        self.registrations: torch.library.Library | None = None  # of the dispatcher; they last as long as this
        self._blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()
        self._pinned: dict[int, torch.UntypedStorage] = {}  # kept, so that no address is another memory's later
        self._downloads: list[tuple[Tensor, Tensor]] = []
        self._uploads: list[tuple[Tensor, Tensor]] = []

    def allocate(self, storage: torch.UntypedStorage) -> _Block:
        """Return the piece of memory that stands for a storage; views share one."""
        block = self._blocks.get(storage._cdata)
        if block is None:
            if self.allocated + storage.nbytes() > self.fraction * self.card.memory:
                raise _out_of_memory()
            block = self._blocks[storage._cdata] = _Block(storage.nbytes())
        return block

    def wait(self, what: str) -> None:
        """The host waits: all copies are done, and memory that they were made from may be overwritten from here on."""
        self.waits[what, _place()] += 1
        downloads, self._downloads = self._downloads, []
        uploads, self._uploads = self._uploads, []
        for host, values in downloads:
            host.copy_(values)
        for host, values in uploads:
            if not torch.equal(host, values):
                raise RuntimeError("host memory was overwritten while a copy from it to the card was under way")

    def pin(self, host: Tensor) -> Tensor:
        """Call a CPU tensor's memory pinned."""
        self._pinned[host.untyped_storage().data_ptr()] = host.untyped_storage()
        return host

    def is_pinned(self, host: Tensor) -> bool:
        """Return whether a CPU tensor lies in pinned memory."""
        return host.untyped_storage().data_ptr() in self._pinned

    def upload(self, host: Tensor, non_blocking: bool) -> Tensor:
        """Return a CPU tensor's values as they arrive on the card. From pageable memory the host waits all the same."""
        host = host.detach()
        if non_blocking and self.is_pinned(host):
            self._uploads.append((host, host.clone()))
        else:
            self.wait("write")
        return host.clone()

    def download(self, values: Tensor, host: Tensor, non_blocking: bool) -> None:
        """Copy into a CPU tensor. Into pinned memory, with non_blocking, the values come when the host has waited."""
        host = host.detach()
        if non_blocking and self.is_pinned(host):
            self._downloads.append((host, values.to(host.dtype, copy=True)))
            host.fill_(float("nan") if host.is_floating_point() else -1)
        else:
            self.wait("read")
            host.copy_(values)

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
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no room for it.")


def _place() -> str:
    """Return the innermost function of the product that is running, as file.function."""
    frame = sys._getframe(1)
    while frame is not None:
        folder, file = os.path.split(frame.f_code.co_filename)
        if folder == PRODUCT or folder.startswith(os.path.join(PRODUCT, "pretrain")):
            return f"{file.removesuffix('.py')}.{frame.f_code.co_qualname.partition('.<locals>')[0]}"
        frame = frame.f_back
    return "elsewhere"


# ---- operations

# In these the host learns what or how many.
WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.equal.default,
    aten.repeat_interleave.Tensor,
}
INDEXING = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
MULTIPLYING = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
WATCHED = {  # whose type, or whose being used at all, the product chooses
    aten._fused_adamw_.default,
    aten._log_softmax.default,
    aten.exp_.default,
    aten.linalg_vector_norm.default,
    aten.logsumexp.default,
}
VARYING = {aten.cumsum.default, aten.kthvalue.default, aten.histc.default, aten.median.dim, aten.put_.default}
RESIZING = {aten.set_.source_Tensor, aten.set_.source_Storage_storage_offset, aten.resize_.default}


def _operate(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """Check the sides of an operation with a tensor of the card, and compute it on the CPU."""
    if func is aten.copy_.default:
        return _copy(*args, **kwargs)
    if torch.Tag.inplace_view in func.tags or func in RESIZING:
        raise NotImplementedError(f"pretend_cuda: no tensor changes its shape in place: {func}")
    if kwargs.get("generator") is not None:  # a card's own cannot be made here
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    cards, others = [], []
    _sort(args, cards, others)
    _sort(kwargs.values(), cards, others)
    if others or func in INDEXING:
        _refuse_two_sides(func, args, others)
    if func in WAITING:
        machine.wait("read")
    if torch.are_deterministic_algorithms_enabled():
        _refuse_what_varies(func, cards[0])
    if func.namespace == "c10d":
        _meet()
    if func in MULTIPLYING:
        machine.products[_product_type(cards[0].dtype), _place()] += 1
    most = machine.card.most_sequences
    if most is not None and func is aten.embedding.default and args[1].dim() == 2 and len(args[1]) > most:
        raise _out_of_memory()
    with machine.random() if torch.Tag.nondeterministic_seeded in func.tags else contextlib.nullcontext():
        out = func(*_on_host(args), **{name: _on_host(value) for name, value in kwargs.items()})
    if func in WATCHED:
        made = next((value for value in (out, *cards) if isinstance(value, Tensor)), None)
        name = func.overloadpacket.__name__
        machine.watched[f"{name} {str(made.dtype).removeprefix('torch.')}", _place()] += 1
    return _on_card(out, {id(card.host): card for card in cards})  # what works in place returns what it was given


def _product_type(dtype: torch.dtype) -> str:
    """Return what a product's factors are rounded to."""
    allowed = torch.get_float32_matmul_precision() != "highest" and machine.card.capability >= hardware.AMPERE
    return "tf32" if dtype == torch.float32 and allowed else str(dtype).removeprefix("torch.")


def _refuse_two_sides(func: torch._ops.OpOverload, args: tuple, others: list[Tensor]) -> None:
    """Raise RuntimeError as a card does for ``others``, the CPU's tensors, unless the operation takes them."""
    if func in INDEXING and isinstance(args[0], CudaTensor):
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


def _refuse_what_varies(func: torch._ops.OpOverload, tensor: CudaTensor) -> None:
    """Raise RuntimeError for what has no deterministic kernel, of what language models use, and for cuBLAS as it is."""
    if func in VARYING and tensor.is_floating_point():
        raise RuntimeError(f"{func} does not have a deterministic implementation")
    if func in MULTIPLYING and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise RuntimeError("cuBLAS is deterministic only with CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8")


def _sort(values: Iterable[Any], cards: list[CudaTensor], others: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            (cards if isinstance(value, CudaTensor) else others).append(value)
        elif isinstance(value, (list, tuple)):
            _sort(value, cards, others)


def _on_host(value: Any) -> Any:
    if isinstance(value, CudaTensor):
        return value.host
    return type(value)(map(_on_host, value)) if type(value) in (list, tuple) else value


def _on_card(value: Any, given: dict[int, CudaTensor]) -> Any:
    if isinstance(value, Tensor):
        return given[id(value)] if id(value) in given else CudaTensor(value)
    return type(value)(_on_card(item, given) for item in value) if type(value) in (list, tuple) else value


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(to, CudaTensor):
        machine.download(source.host, to, non_blocking)
    elif isinstance(source, CudaTensor):
        to.host.copy_(source.host)
    else:
        to.host.copy_(machine.upload(source, non_blocking))
    return to


# ---- from side to side


class _Move(torch.autograd.Function):
    """From one side to the other, and the gradient back."""

    @staticmethod
    def forward(ctx, tensor: Tensor, non_blocking: bool) -> Tensor:
        ctx.left = tensor.device
        if not isinstance(tensor, CudaTensor):
            return CudaTensor(machine.upload(tensor, non_blocking))
        host = torch.empty_like(tensor.host)
        machine.download(tensor.host, machine.pin(host) if non_blocking else host, non_blocking)
        return host

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.left), None


def _to(tensor: Tensor, *args, copy: bool = False, **kwargs) -> Tensor:
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Tensor):
        device = other.device
    if _side(device) not in (None, isinstance(tensor, CudaTensor)):
        tensor, copy = _Move.apply(tensor, non_blocking), False
    elif _side(device) is None and device is not None:  # meta
        return move_or_cast(tensor, *args, copy=copy, **kwargs)
    return move_or_cast(tensor, dtype or tensor.dtype, copy=copy, memory_format=memory_format or torch.preserve_format)


def _cpu(tensor: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    return tensor.to("cpu", memory_format=memory_format)


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    if isinstance(tensor, CudaTensor):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return tensor if machine.is_pinned(tensor) else machine.pin(tensor.clone())


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return not isinstance(tensor, CudaTensor) and machine.is_pinned(tensor)


def _side(device: Any) -> bool | None:
    """Return True for the card, False for the CPU, None for others."""
    device = None if device is None else torch.device(device)
    if device is not None and device.type == "cuda":
        torch.cuda.init()
        if device.index is not None and _ordinal(device.index) != machine.device.index:
            raise NotImplementedError(f"pretend_cuda: this process computes on {machine.device}, not on {device}")
    return {"cuda": True, "cpu": False}.get(device.type) if device else None


# ---- tensors that are made

COPYING = {"tensor", "as_tensor", "asarray", "new_tensor"}  # of values that the host has
DRAWING = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"}
MAKING = (
    COPYING - {"new_tensor"}
    | DRAWING
    | {"arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "zeros"}
)
MAKING |= {"scalar_tensor", "empty_like", "full_like", "ones_like", "zeros_like"}


def _makes(owner: Any, name: str) -> None:
    """Have a function of torch, or a method of its tensors, make what it makes on the side that it is asked for."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def make(*args, **kwargs) -> Tensor:
        pinned, side = kwargs.pop("pin_memory", False), _side(kwargs.get("device"))
        if side is None and name == "new_tensor":
            side = isinstance(args[0], CudaTensor)
        if side is not None:
            kwargs["device"] = "cpu"
        with machine.random() if side and name in DRAWING else contextlib.nullcontext():
            out = real(*args, **kwargs)
        if side and not isinstance(out, CudaTensor):
            if name in COPYING:
                machine.wait("write")
            out = CudaTensor(out.detach()).requires_grad_() if out.requires_grad else CudaTensor(out.detach())
        elif side is False and isinstance(out, CudaTensor):
            out = out.cpu()
        return machine.pin(out) if pinned else out

    setattr(owner, name, make)


# ---- attention


@functools.wraps(attend)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention by its definition, and note the kernel that a card would have taken."""
    if not isinstance(query, CudaTensor):
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and is_causal:
        raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    kernel = _kernel(query, attn_mask)
    machine.kernels[kernel, _place()] += 1
    with torch.profiler.record_function(f"aten::_scaled_dot_product_{kernel}_attention"):
        pass
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return F.dropout(scores.softmax(-1), dropout_p) @ value


def _kernel(query: Tensor, mask: Tensor | None) -> str:
    """Return the kernel that PyTorch would take: its sdp_utils.cpp, in short. Raises RuntimeError where none may run."""
    capability, settings = machine.card.capability, torch.backends.cuda
    modern, half = capability >= hardware.AMPERE, query.dtype in (torch.float16, torch.bfloat16)
    able = {
        "flash": settings.flash_sdp_enabled() and modern and half and mask is None and query.shape[-1] <= 256,
        "efficient": settings.mem_efficient_sdp_enabled() and (modern or query.dtype != torch.bfloat16),
        "math": settings.math_sdp_enabled(),
        "cudnn": settings.cudnn_sdp_enabled() and modern and half and not torch.are_deterministic_algorithms_enabled(),
    }
    if not any(able.values()):
        raise RuntimeError("No available kernel. Aborting execution.")
    order = ["cudnn", *able] if capability[0] in (9, 10) else able
    return next(name for name in order if able[name])


# ---- autocast


def _autocast_as_cuda() -> torch.library.Library:
    """Give autocast its CUDA lists for ``CudaTensor``: its own kernels cast no tensor that C++ believes on the CPU.

    The lists are those of the installed PyTorch, from a header that comes with it. The third one, of operations that take
    the widest type of their arguments, does what those operations do themselves. The registrations end with the result.
    """
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text(encoding="utf-8")
    library = torch.library.Library("aten", "IMPL")
    half, full = (lambda: torch.get_autocast_dtype("cuda")), (lambda: torch.float32)
    for macro, dtype in {"LOWER_PRECISION_FP": half, "FP32": full, "FP32_SET_OPT_DTYPE": full}.items():
        (body,) = re.findall(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)+)", header)
        for name, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body):
            operation = getattr(getattr(aten, name), overload or "default")
            library.impl(f"{name}.{overload}" if overload else name, _autocast(operation, dtype), "AutocastCUDA")
    return library


def _autocast(operation: torch._ops.OpOverload, dtype: Callable[[], torch.dtype]) -> Callable:
    def kernel(*args, **kwargs):
        def cast(value: Any) -> Any:
            if isinstance(value, CudaTensor) and value.is_floating_point() and value.dtype != torch.float64:
                return move_or_cast(value, dtype())
            return type(value)(map(cast, value)) if type(value) in (list, tuple) else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)):
            return operation(*cast(args), **{name: cast(value) for name, value in kwargs.items()})

    return kernel


# ---- what torch.cuda and NVML are asked


def _ordinal(index: int) -> int:
    if not 0 <= index < machine.card.count:
        raise RuntimeError("CUDA error: invalid device ordinal")
    return index


def _set_device(index: int) -> None:
    if machine.allocated and _ordinal(index) != machine.device.index:
        raise NotImplementedError("pretend_cuda: a process computes on one card")
    machine.device = torch.device("cuda", _ordinal(index))


def _initialize() -> None:
    machine.allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    torch.cuda.default_generators = (machine.generator,) * machine.card.count


def _properties(index: int) -> types.SimpleNamespace:
    _ordinal(index)
    card, (major, minor) = machine.card, machine.card.capability
    return types.SimpleNamespace(name=card.name, major=major, minor=minor, total_memory=card.memory)


def _memory_stats(index: int) -> dict:
    bytes_of = {"allocated": (machine.allocated, machine.peak), "reserved": (machine.reserved, machine.reserved)}
    _ordinal(index)
    return {f"{name}_bytes": {"all": {"current": now, "peak": most}} for name, (now, most) in bytes_of.items()}


def _free_memory(index: int) -> tuple[int, int]:
    _ordinal(index)
    return machine.card.memory - machine.reserved - machine.others, machine.card.memory


def _limit_memory(fraction: float, index: int) -> None:
    _ordinal(index)
    machine.fraction = fraction


def _empty_cache() -> None:
    machine.emptied += 1
    machine.reserved = machine.allocated


def _reset_peak(index: int) -> None:
    _ordinal(index)
    machine.peak = machine.allocated


C_FUNCTIONS = {
    "_cuda_init": _initialize,
    "_cuda_getDeviceCount": lambda: machine.card.count,
    "_cuda_getDevice": lambda: machine.device.index,
    "_cuda_setDevice": _set_device,
    "_cuda_synchronize": lambda: machine.wait("synchronize"),
    "_cuda_memoryStats": _memory_stats,
    "_cuda_setMemoryFraction": _limit_memory,
    "_cuda_resetPeakMemoryStats": _reset_peak,
    "_cuda_emptyCache": _empty_cache,
    "_cuda_getArchFlags": lambda: WHEELS[torch.version.cuda],
    "_cuda_getCurrentRawStream": None,  # the compiler imports it
}
NVML_FUNCTIONS = {
    "nvmlInit": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "580.1",
    "nvmlDeviceGetHandleByIndex": _ordinal,
    "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=UTILIZATION),
    "nvmlDeviceGetPowerUsage": lambda handle: MILLIWATTS,
    "NVMLError_DriverNotLoaded": type("NVMLError_DriverNotLoaded", (Exception,), {}),
}


def _compile() -> Callable:
    """Return a torch.compile that checks its arguments and compiles nothing."""
    signature = inspect.signature(torch.compile)

    def compiled(*args, **kwargs) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        model = given.pop("model")
        machine.compiled.append(given)
        if isinstance(model, nn.Module):
            model.forward = _traced(model.forward)
        return model

    return compiled


def _traced(forward: Callable) -> Callable:
    """Have Transformers ask no values of a mask or of positions, as while it is compiled: each would be a wait."""

    def run(*args, **kwargs) -> Any:
        with mock.patch.object(masking_utils, "is_tracing", lambda tensor=None: True):
            return forward(*args, **kwargs)

    return run


def _grouped() -> Callable:
    """Return what groups an optimizer's tensors by device and type, with the device that Python knows."""
    real = torch._C._group_tensors_by_device_and_dtype

    def grouped(lists: list[list[Tensor]], with_indices: bool = False) -> dict:
        found = real(lists, with_indices).items()
        return {(tensors[0][0].device, dtype): (tensors, indices) for (_, dtype), (tensors, indices) in found}

    return grouped


def _profile() -> Callable:
    """Return a beginning of torch.profiler.profile that leaves the card out, of which a CPU build cannot record."""
    real = torch.profiler.profile.__init__

    def begin(self, *, activities: Iterable | None = None, **kwargs) -> None:
        machine.profiled += [activity.name for activity in activities or ()]
        cpu = [activity for activity in activities or () if activity != torch.profiler.ProfilerActivity.CUDA]
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
        if machine.backend != "nccl":
            return real(**given)
        machine.has_met = False
        return real(**given | {"backend": "gloo", "device_id": None})

    return join


def _meet() -> None:
    """Raise DistBackendError where two processes have one card, as NCCL does at the first exchange."""
    if not machine.has_met:
        machine.has_met = True
        places: list = [None] * dist.get_world_size()
        dist.all_gather_object(places, machine.device.index)
        if len(set(places)) < len(places):
            raise dist.DistBackendError(f"Duplicate GPU detected: {places}")


def _exchange(module: nn.Module, wanted: Callable[[], bool], dtype: torch.dtype | None = None) -> None:
    """Have a module's gradients averaged between the processes, in ``dtype``, as each becomes whole."""

    def average(parameter: nn.Parameter) -> None:
        if wanted():
            sent = parameter.grad.host.to(dtype or parameter.grad.dtype)
            machine.exchanges[f"all-reduce {str(sent.dtype).removeprefix('torch.')}"] += sent.nbytes
            dist.all_reduce(sent)
            parameter.grad.host.copy_(sent / dist.get_world_size())

    for parameter in module.parameters():
        if not getattr(parameter, "is_exchanged", False):
            parameter.is_exchanged = True
            parameter.register_post_accumulate_grad_hook(average)


class DataParallel(nn.Module):
    """DistributedDataParallel, whose C++ would take the card's tensors for the CPU's."""

    signature = inspect.signature(nn.parallel.DistributedDataParallel)

    def __init__(self, *args, **kwargs):
        super().__init__()
        given = self.signature.bind(*args, **kwargs).arguments
        self.module, self.wanted = given.pop("module"), True
        if given.get("device_ids") != [machine.device.index]:
            raise ValueError(f"device_ids = {given.get('device_ids')}, on {machine.device}")
        machine.wrapped.append((type(self.module).__name__, given))
        for parameter in self.module.parameters():
            dist.broadcast(parameter.detach().host, 0)
        _exchange(self.module, lambda: self.wanted)

    def forward(self, *args, **kwargs) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.wanted = False
        try:
            yield
        finally:
            self.wanted = True


def _shard() -> Callable:
    """Return a fully_shard that notes what it is given, and leaves each weight whole."""
    signature = inspect.signature(fsdp.fully_shard)

    def switch(module: nn.Module, wanted: bool) -> None:
        machine.exchanging = wanted

    def shard(*args, **kwargs) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        modules = given.pop("module")
        for module in modules if isinstance(modules, (list, tuple)) else [modules]:
            machine.wrapped.append((type(module).__name__, given))
            _exchange(module, lambda: machine.exchanging, given["mp_policy"].reduce_dtype)
            methods = {"set_requires_gradient_sync": switch}
            methods |= {"reset_iter_state": lambda self: None} if hasattr(fsdp.FSDPModule, "reset_iter_state") else {}
            module.__class__ = type(f"FSDP{type(module).__name__}", (fsdp.FSDPModule, type(module)), methods)
        return modules

    return shard


def pretend(card: Card, compiler: bool = True) -> Machine:
    """Make this process one that has ``card``; return what becomes known of it from here on.

    Args:
        compiler: whether Triton is installed.
    """
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
    torch.accelerator.current_stream = lambda device=None: types.SimpleNamespace(is_capturing=lambda: False)
    torch.version.cuda = "13.0" if card.capability >= (7, 5) else "12.6"
    sys.modules["pynvml"] = torch.cuda.pynvml = types.ModuleType("pynvml")
    vars(torch.cuda.pynvml).update(NVML_FUNCTIONS)
    torch.cuda._HAS_PYNVML = True

    for name in MAKING:
        _makes(torch, name)
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        _makes(Tensor, name)
    Tensor.to, Tensor.cpu = _to, _cpu
    Tensor.pin_memory, Tensor.is_pinned = _pin_memory, _is_pinned
    F.scaled_dot_product_attention = _attention
    machine.registrations = _autocast_as_cuda()
    torch._C._group_tensors_by_device_and_dtype = _grouped()
    dist.init_process_group = torch.distributed.distributed_c10d.init_process_group = _join()
    nn.parallel.DistributedDataParallel, fsdp.fully_shard = DataParallel, _shard()
    _foreach_utils._foreach_supported_types.append(CudaTensor)  # as the plain tensors of a card are
    torch.profiler.profile.__init__ = _profile()
    torch.compile, hardware.has_triton_package = _compile(), lambda: compiler
    return machine


def on(card: Card, work: Callable[[Machine], None]) -> None:
    """Call ``work`` in a fork that has the card; what it raises fails the test."""

    def call() -> None:
        work(pretend(card))

    in_fork(call)
