"""Causal attention for training, and attention that does not cross document boundaries.

Symbols in shapes: B sequences, T tokens, E width of the model.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.profiler import ProfilerActivity, profile
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ursa_minor.recipe import keys

CAUSAL = "ursa_causal"
# Backends of F.scaled_dot_product_attention. The remaining one, math, is the fallback.
KERNELS = ("cudnn", "flash", "efficient")
# Smallest width of a head that the kernel of FlexAttention supports.
FLEX_WIDTH = 16


def register_causal_attention() -> None:
    """Register an attention function with Transformers that uses SDPA's causal mode without a mask.

    Under torch.compile, Transformers builds a (B, 1, T, T) mask, because its check for packed
    sequences cannot be skipped while tracing (``create_causal_mask`` in masking_utils.py). With a
    mask, SDPA cannot use its flash kernel.

    Padding and a key-value cache need a mask. For these, the registered functions call those of
    Transformers.
    """
    AttentionInterface.register(CAUSAL, _causal_attention)
    AttentionMaskInterface.register(CAUSAL, _causal_mask)


def _causal_mask(
    *, q_length: int, kv_length: int, attention_mask=None, **kwargs
) -> torch.Tensor | None:
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs
    )


def _causal_attention(
    module, query, key, value, attention_mask, *, dropout=0.0, scaling=None, **kwargs
):
    """Compute attention as Transformers calls it.

    Args:
        module: the attention layer.
        query: (B, heads, T, E/heads).
        key, value: the same shape, or fewer heads, each of which serves a group of query heads.
        attention_mask: None for causal attention. Otherwise a mask of ``within_documents``, or one
            of Transformers for padding or a cache.

    Returns:
        The output (B, T, heads, E/heads), and None instead of the attention weights.
    """
    if isinstance(attention_mask, BlockMask):
        if not dropout and query.shape[-1] >= FLEX_WIDTH:
            # Under autocast, Llama's rotation leaves queries and keys in fp32.
            query = query.to(value.dtype)
            key = key.to(value.dtype)
            out = flex_attention(
                query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True
            )
            return out.transpose(1, 2), None
        batch_size, _, length, _ = query.shape
        attention_mask = create_mask(
            attention_mask.mask_mod, batch_size, None, length, length, query.device
        )
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )

    # Only flash kernels accept fewer key heads: on a CPU, and on GPUs from Ampere on, which are
    # those with bf16. Elsewhere PyTorch would fall back to its slow kernel, so key heads are
    # repeated.
    group_size = query.shape[1] // key.shape[1]
    is_grouped = group_size > 1
    has_grouped_kernel = value.device.type == "cpu" or value.dtype == torch.bfloat16
    if is_grouped and not has_grouped_kernel:
        key = repeat_kv(key, group_size)
        value = repeat_kv(value, group_size)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=is_grouped and has_grouped_kernel,
    )
    return out.transpose(1, 2), None


def within_documents(inputs_BT: torch.Tensor, *, separator: int, flex: bool | None = None) -> dict:
    """Return model arguments with which tokens attend only to their own document.

    A document starts at each separator. The tokens before the first separator of a row also form a
    document. Positions start at 0 in each document.

    The mask is a ``BlockMask`` of FlexAttention if the model is compiled for a GPU: its kernel
    skips the pairs of tokens in different documents. Otherwise SDPA gets a mask of T x T bytes per
    row. This is also the fallback for attention dropout and for heads narrower than 16, which
    FlexAttention does not support. The flash kernel of a CPU accepts such a mask. That of a GPU
    does not, and its memory-efficient kernel computes all T x T pairs.

    Args:
        inputs_BT: (B, T) int64 token ids.
        separator: the id at the start of each document.
        flex: whether to use FlexAttention. Defaults to True while compiling for a GPU, else False.

    Returns:
        ``position_ids``, (B, T) int64, and ``attention_mask``, a BlockMask or a (B, 1, T, T) bool
        tensor that is True where a token attends.
    """
    batch_size, length = inputs_BT.shape
    device = inputs_BT.device
    index_T = torch.arange(length, device=device)
    # Index of the first token of each token's document.
    start_BT = torch.where(inputs_BT == separator, index_T, 0).cummax(1).values

    def is_visible(row, head, query, key):
        return (start_BT[row, query] <= key) & (key <= query)

    if flex is None:
        flex = inputs_BT.is_cuda and torch.compiler.is_compiling()
    if flex:
        mask = create_block_mask(is_visible, batch_size, None, length, length, device)
        # GPT-2 recognizes a mask of padding, which it would expand, by its number of dimensions.
        mask.ndim = 4
    else:
        row_B111 = torch.arange(batch_size, device=device)[:, None, None, None]
        mask = is_visible(row_B111, None, index_T[:, None], index_T)
    return {"position_ids": index_T - start_BT, "attention_mask": mask}


def find_kernel(
    model: keys.Model,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    document_mask: bool,
    compiled: bool,
) -> str:
    """Return the kernel that computes attention in a training step.

    It is read from a profile of one call with the shapes of a layer. The kernel that PyTorch
    prefers depends on its version and on the GPU, and ``torch.backends.cuda.can_use_*`` do not
    report its order of preference.

    Args:
        model: the model keys of a completed recipe.
        batch_size: sequences per micro-batch.
        device: the device that trains.
        dtype: dtype of queries, keys and values.
        document_mask: whether attention stays within documents.
        compiled: whether training is compiled.

    Returns:
        cudnn, flash, efficient or math (backends of SDPA), or flex (FlexAttention).
    """
    assert model.n_embd is not None
    assert model.n_head is not None
    head_width = model.n_embd // model.n_head
    key_heads = model.num_key_value_heads or model.n_head
    has_flex = compiled and not model.attn_pdrop and head_width >= FLEX_WIDTH
    if document_mask and has_flex:
        return "flex"

    def make_heads(heads: int) -> torch.Tensor:
        shape = (batch_size, heads, model.sequence_length, head_width)
        return torch.empty(shape, device=device, dtype=dtype, requires_grad=True)

    query = make_heads(model.n_head)
    key = make_heads(key_heads)
    value = make_heads(key_heads)
    mask = None
    if document_mask:
        ids = torch.zeros(batch_size, model.sequence_length, dtype=torch.int64, device=device)
        mask = within_documents(ids, separator=0)["attention_mask"]
    # torch 2.11 warns if acc_events is not set.
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        _causal_attention(torch.nn.Module(), query, key, value, mask, dropout=model.attn_pdrop)
    operators = " ".join(event.key for event in profiler.key_averages())
    for kernel in KERNELS:
        if f"dot_product_{kernel}_attention" in operators:
            return kernel
    return "math"
