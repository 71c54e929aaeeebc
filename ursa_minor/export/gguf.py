"""A model as a GGUF file, as llama.cpp and Ollama read it: weights, tokenizer and chat template in one."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import join_or
from ursa_minor.data.tokens import split_points
from ursa_minor.model.finite import require_finite, require_stored

PRECISIONS = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
# What llama.cpp computes with, of what is written here; the three GELUs are one function.
COMPUTED: dict[str, list[Any]] = {
    "model_type": ["gpt2", "llama"],
    "hidden_act": ["silu"],
    "rope_type": ["default"],
}
COMPUTED |= {"activation_function": ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"]}
COMPUTED |= dict.fromkeys(
    ("scale_attn_by_inverse_layer_idx", "attention_bias", "mlp_bias"), [False]
)
Q8_BLOCK = 32  # values that share a scale
# The largest value of each type. The scale of a q8_0 block is its largest value / 127, in fp16.
LIMITS = {
    "F32": torch.finfo(torch.float32).max,
    "F16": torch.finfo(torch.float16).max,
    "Q8_0": 127 * torch.finfo(torch.float16).max,
}
# llama.cpp's name of a split, and whether it looks whole words up before it merges. It has names for others (GPT-4o's),
# which it splits by another regex than the tokenizer's own: the ids would differ.
SPLITS = {
    "gpt2": ("gpt-2", False),
    split_points.QWEN35: ("qwen35", False),
    split_points.QWEN2: ("qwen2", False),
}
SPLITS |= {split_points.LLAMA3: ("llama-bpe", True)}
# A message as ChatML has it, in the language of Ollama's templates.
CHAT = """TEMPLATE \"\"\"{{ range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
\"\"\"
PARAMETER stop <|im_end|>
"""


def refuse(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise BadInput where llama.cpp would compute or split otherwise, or the gguf package is missing."""
    config, problems = model.config, []
    if _split_name(tokenizer) is None:
        problems.append(
            "llama.cpp has no name for how this tokenizer splits text; it has GPT-2's, and that of a bpe"
        )
    config_values = config.to_dict()
    config_values |= config_values.get("rope_parameters") or {}
    for name, usual in COMPUTED.items():
        if config_values.get(name, usual[0]) not in usual:
            problems.append(
                f"the model's {name} = {config_values[name]}: must be {join_or(usual)}, with which llama.cpp computes"
            )
    if find_spec("gguf") is None:
        problems.append("needs the gguf package: pip install gguf")
    if problems:
        raise BadInput(f"--gguf: {problem}" for problem in problems)


def check_overflow(stock: PreTrainedModel, precision: str) -> None:
    """Raise BadInput for a weight that the GGUF file would store as infinity.

    Args:
        stock: as for ``write``.
        precision: as for ``write``.
    """
    for _ in _stored_tensors(stock, precision):
        pass


def write(
    stock: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    name: str,
    precision: str,
) -> None:
    """Write ``<name>.gguf`` and Ollama's ``Modelfile`` into a folder, which holds the tokenizer's files (``export.save``).

    Args:
        stock: Transformers' own model, without padding of the vocabulary (``export.as_stock``).
        precision: f32, f16 or q8_0 (8 bits, a scale for 32 of them) for matrices; vectors and positions stay f32.
    """
    import gguf

    config, path = stock.config, folder / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_name(name)
    writer.add_file_type(getattr(gguf.LlamaFileType, PRECISIONS[precision]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokenizer(writer, stock, tokenizer, folder)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers
    )
    for tensor in _stored_tensors(stock, precision):
        written_name = names.get_name(tensor.key, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(written_name, tensor.data, raw_dtype=tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    template = CHAT if tokenizer.chat_template else 'TEMPLATE "{{ .Prompt }}"\n'
    context = f"PARAMETER num_ctx {config.max_position_embeddings}\n"
    files.write_text(folder / "Modelfile", f"FROM ./{name}.gguf\n{template}{context}")


class StoredTensor(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        key: its name in the model.
        data: its values as they are stored.
        kind: ``gguf.GGMLQuantizationType`` of the values.
    """

    key: str
    data: np.ndarray
    kind: Any


def _stored_tensors(stock: PreTrainedModel, precision: str) -> Iterator[StoredTensor]:
    """Yield each weight as it is stored, tied ones once.

    Raises BadInput for a weight that is not finite, or that becomes infinite in its format.
    """
    import gguf

    for key, tensor in stock.state_dict().items():
        if key in stock.all_tied_weights_keys:
            continue
        require_finite(key, tensor)
        weight = _as_llama_cpp_has_it(key, tensor.float(), stock.config)
        kind = gguf.GGMLQuantizationType[_kind_name(key, weight, precision)]
        # Overflows are reported below with the name of the weight.
        with np.errstate(over="ignore", invalid="ignore"):
            data = gguf.quants.quantize(weight.numpy(), kind)
            read_back = torch.from_numpy(gguf.quants.dequantize(data, kind))
        require_stored(
            key,
            weight,
            read_back,
            limit=LIMITS[kind.name],
            label=f"{kind.name.lower()} (--gguf {precision})",
            fix="Use --gguf f32",
        )
        yield StoredTensor(key, data, kind)


def _kind_name(key: str, weight: torch.Tensor, precision: str) -> str:
    """Return the name of the ``gguf.GGMLQuantizationType`` that stores a weight.

    Vectors and position embeddings stay in fp32. A matrix whose rows cannot be divided into blocks
    of q8_0 falls back to fp16.
    """
    if weight.ndim != 2 or key.endswith("wpe.weight"):
        return "F32"
    if precision == "q8_0" and weight.shape[1] % Q8_BLOCK:
        return "F16"
    return precision.upper()


def _as_llama_cpp_has_it(key: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Return a weight as llama.cpp has it: (out, in), and a head's rotated pairs side by side."""
    if config.model_type == "gpt2":
        # Conv1D is (in, out).
        return tensor.T.contiguous() if ".c_" in key and tensor.ndim == 2 else tensor
    for name, heads in (
        ("q_proj", config.num_attention_heads),
        ("k_proj", config.num_key_value_heads),
    ):
        if name in key:
            return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return tensor


def _split_name(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return llama.cpp's name of how a byte-level BPE splits; None: it has none."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    name, whole_words = SPLITS.get(
        split_points.word_regex(definition["pre_tokenizer"] or {}) or "", (None, False)
    )
    model, as_is = definition["model"], definition["normalizer"] in (None, {"type": "NFC"})
    return (
        name if as_is and model["type"] == "BPE" and model["ignore_merges"] == whole_words else None
    )


def _add_tokenizer(
    writer: Any, stock: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    import gguf

    special = {i: token.special for i, token in tokenizer.added_tokens_decoder.items()}
    texts = {i: text for text, i in tokenizer.get_vocab().items()}
    ids, kinds = range(stock.config.vocab_size), gguf.TokenType
    control = {True: kinds.CONTROL, False: kinds.USER_DEFINED, None: kinds.NORMAL}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_name(tokenizer))
    writer.add_token_list([texts.get(i, f"[unused {i}]") for i in ids])
    writer.add_token_types([control[special.get(i)] if i in texts else kinds.UNUSED for i in ids])
    vocab = gguf.SpecialVocab(folder, load_merges=True)
    vocab.add_special_token = {"bos": tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id}
    ends = stock.generation_config.eos_token_id
    if tokenizer.chat_template and isinstance(ends, list):
        vocab.special_token_ids["eot"] = next(
            (i for i in ends if i != tokenizer.eos_token_id), ends[0]
        )
    vocab.add_to_gguf(writer, quiet=True)
