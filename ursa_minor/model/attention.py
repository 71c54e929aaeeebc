"""The causal attention that models train with, registered with Transformers, and attention within documents.

Legend: B sequences, T tokens, E width.
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
KERNELS = ("cudnn", "flash", "efficient")  # SDPA's backends, beside math
FLEX_WIDTH = 16  # the narrowest head that FlexAttention's kernel takes


def register_causal_attention() -> None:
    """Register with Transformers an attention that asks SDPA for causal attention and hands it no mask.

    Under torch.compile, Transformers' own path builds a (B, 1, T, T) mask (its packed-sequence check cannot skip while
    tracing: masking_utils.py, create_causal_mask), and a mask rules out the flash kernel. Padding and a cache do need
    a mask: there both functions hand over to Transformers' own.
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
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs
):
    """Attend over (B, heads, T, E/heads); return (B, T, heads, E/heads) and no weights, as Transformers expects.

    Keys and values may have fewer heads, each shared by a group of query heads.
    """
    if isinstance(attention_mask, BlockMask):
        if not dropout and query.shape[-1] >= FLEX_WIDTH:
            # Under autocast Llama's rotation leaves queries and keys in fp32.
            query, key = query.to(value.dtype), key.to(value.dtype)
            out = flex_attention(
                query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True
            )
            return out.transpose(1, 2), None
        B, _, T, _ = query.shape
        attention_mask = create_mask(attention_mask.mask_mod, B, None, T, T, query.device)
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    group = query.shape[1] // key.shape[1]
    # Flash alone takes fewer heads of keys: the CPU's, and a card's from Ampere on, which is where bf16 is. Elsewhere
    # torch would leave its fast kernels.
    takes_groups = group > 1 and (value.device.type == "cpu" or value.dtype == torch.bfloat16)
    if group > 1 and not takes_groups:
        key, value = repeat_kv(key, group), repeat_kv(value, group)
    out = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=takes_groups
    )
    return out.transpose(1, 2), None


def within_documents(inputs_BT: torch.Tensor, *, separator: int, flex: bool | None = None) -> dict:
    """Return the arguments under which a model reads each document of a packed row as if it stood alone.

    A document begins at each separator; what stands before a row's first one counts as one too. Positions begin at 0
    in each document, and a token sees itself and what stands before it in its document.

    In torch.compile on a card the mask is FlexAttention's, whose kernel skips what lies between documents. Elsewhere,
    and with attention dropout or heads narrower than 16, neither of which it takes, SDPA gets a mask of T x T bytes a
    row: a CPU's flash kernel takes one; a card's does not, and the memory-efficient kernel computes all T x T.

    Args:
        inputs_BT: (B, T) int64 ids.
        separator: the id that stands before each document.
        flex: whether the mask is FlexAttention's; None: in torch.compile on a card.

    Returns ``position_ids``, (B, T) int64, and ``attention_mask``, a BlockMask or (B, 1, T, T) bool, True where seen.
    """
    (B, T), device = inputs_BT.shape, inputs_BT.device
    index_T = torch.arange(T, device=device)
    begins_BT = torch.where(inputs_BT == separator, index_T, 0).cummax(1).values

    def seen(row, head, query, key):
        return (begins_BT[row, query] <= key) & (key <= query)

    if flex is None:
        flex = inputs_BT.is_cuda and torch.compiler.is_compiling()
    if flex:
        mask = create_block_mask(seen, B, None, T, T, device)
        mask.ndim = 4  # GPT-2 asks, to know a whole mask from one of padding
    else:
        row_B111 = torch.arange(B, device=device)[:, None, None, None]
        mask = seen(row_B111, None, index_T[:, None], index_T)
    return {"position_ids": index_T - begins_BT, "attention_mask": mask}


def find_kernel(
    model: keys.Model,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    document_mask: bool,
    compiled: bool,
) -> str:
    """Return the kernel of a training step's attention: cudnn, flash, efficient, math, or flex.

    Seen in a profile of one call on a layer's shapes: which of the kernels that can PyTorch prefers differs by its
    version and the card, and torch.backends.cuda.can_use_* do not say the order.
    """
    assert model.n_embd and model.n_head  # of a recipe that is complete
    width, groups = model.n_embd // model.n_head, model.num_key_value_heads or model.n_head
    if document_mask and compiled and not model.attn_pdrop and width >= FLEX_WIDTH:
        return "flex"
    query, key, value = (
        torch.empty(
            batch_size,
            heads,
            model.sequence_length,
            width,
            device=device,
            dtype=dtype,
            requires_grad=True,
        )
        for heads in (model.n_head, groups, groups)
    )
    ids = torch.zeros(batch_size, model.sequence_length, dtype=torch.int64, device=device)
    mask = within_documents(ids, separator=0)["attention_mask"] if document_mask else None
    with profile(
        activities=[ProfilerActivity.CPU], acc_events=True
    ) as seen:  # else torch 2.11 warns
        _causal_attention(torch.nn.Module(), query, key, value, mask, model.attn_pdrop)
    names = " ".join(event.key for event in seen.key_averages())
    return next((name for name in KERNELS if f"dot_product_{name}_attention" in names), "math")
