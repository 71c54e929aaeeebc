"""Write weights, tokenizer and chat template of a model as a GGUF file for llama.cpp and Ollama."""

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

# Values of --gguf, and llama.cpp's names of these precisions (gguf.LlamaFileType).
PRECISIONS = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
# Values of config keys with which llama.cpp computes the same as Transformers. A config does not
# need to have all these keys. llama.cpp has one GELU for the three names.
SUPPORTED_CONFIG: dict[str, list[Any]] = {
    "model_type": ["gpt2", "llama"],
    "hidden_act": ["silu"],
    "rope_type": ["default"],
    "activation_function": ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"],
    "scale_attn_by_inverse_layer_idx": [False],
    "attention_bias": [False],
    "mlp_bias": [False],
}
Q8_BLOCK = 32  # number of values that share a scale
# The largest value of each type. The scale of a q8_0 block is its largest value / 127, in fp16.
LIMITS = {
    "F32": torch.finfo(torch.float32).max,
    "F16": torch.finfo(torch.float16).max,
    "Q8_0": 127 * torch.finfo(torch.float16).max,
}


class Split(NamedTuple):
    """The way in which a byte-level BPE tokenizer splits text into words.

    Attributes:
        name: llama.cpp's name of this split (``tokenizer.ggml.pre`` in the file).
        ignore_merges: whether a word that is a token is encoded as this token, without merging.
    """

    name: str
    ignore_merges: bool = False


# The split for each regex of a tokenizer. llama.cpp has names for further splits (GPT-4o's, for
# example), but its regexes for them differ from the tokenizers' own, so the ids would differ.
SPLITS = {
    "gpt2": Split("gpt-2"),
    split_points.QWEN35: Split("qwen35"),
    split_points.QWEN2: Split("qwen2"),
    split_points.LLAMA3: Split("llama-bpe", ignore_merges=True),
}
# A model without a chat template continues the prompt.
PROMPT_TEMPLATE = 'TEMPLATE "{{ .Prompt }}"\n'
# The chat template of post/chatml.jinja, in the language of Ollama's templates.
CHAT_TEMPLATE = """TEMPLATE \"\"\"{{ range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
\"\"\"
PARAMETER stop <|im_end|>
"""


def check_supported(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise BadInput if llama.cpp computes or tokenizes differently, or if gguf is missing."""
    problems = []
    if _split_name(tokenizer) is None:
        problems.append(
            "llama.cpp does not support the way in which this tokenizer splits text. Leave out "
            "--gguf, or train a model with GPT-2's tokenizer or with --tokenizer bpe"
        )
    config_values = model.config.to_dict()
    config_values |= config_values.get("rope_parameters") or {}
    for key, supported in SUPPORTED_CONFIG.items():
        if key in config_values and config_values[key] not in supported:
            problems.append(
                f"the model has {key} = {config_values[key]}, but llama.cpp supports only "
                f"{join_or(supported)}. Leave out --gguf"
            )
    if find_spec("gguf") is None:
        problems.append("the package gguf is not installed. Install it: pip install gguf")
    if problems:
        raise BadInput(f"--gguf: {problem}" for problem in problems)


def check_overflow(stock: PreTrainedModel, precision: str) -> None:
    """Raise BadInput for a weight that the GGUF file would store as infinity.

    Args:
        stock: the stock model (see ``write``).
        precision: f32, f16 or q8_0 (see ``write``).
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
    """Write ``<name>.gguf`` and a ``Modelfile`` for Ollama into a folder.

    Args:
        stock: the stock model without padding of the vocabulary (``stock.to_transformers`` with
            ``trim_vocab``).
        tokenizer: tokenizer of the model.
        folder: folder for the files. It must contain the files of the tokenizer (``stock.save``),
            from which the merges are read.
        name: name of the file and of the model in it.
        precision: format of the matrices: f32, f16 or q8_0 (8 bits, with one scale for 32 values).
            Vectors and position embeddings are stored in fp32.
    """
    import gguf

    config = stock.config
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", config.model_type)
    writer.add_name(name)
    writer.add_file_type(getattr(gguf.LlamaFileType, PRECISIONS[precision]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, config)
    _add_tokenizer(writer, stock, tokenizer, folder)

    architecture = gguf.MODEL_ARCH[config.model_type.upper()]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for tensor in _stored_tensors(stock, precision):
        written_name = names.get_name(tensor.key, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(written_name, tensor.data, raw_dtype=tensor.kind)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    template = CHAT_TEMPLATE if tokenizer.chat_template else PROMPT_TEMPLATE
    context = f"PARAMETER num_ctx {config.max_position_embeddings}\n"
    files.write_text(folder / "Modelfile", f"FROM ./{name}.gguf\n{template}{context}")


def _add_shape(writer: Any, config: Any) -> None:
    """Add the shape of the model and the constants of its norms and rotary embeddings."""
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


class StoredTensor(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        key: name of the tensor in the model.
        data: values as they are stored.
        kind: ``gguf.GGMLQuantizationType`` of the values.
    """

    key: str
    data: np.ndarray
    kind: Any


def _stored_tensors(stock: PreTrainedModel, precision: str) -> Iterator[StoredTensor]:
    """Yield each weight as it is stored, tied weights once.

    Raises BadInput for a weight that is not finite, or that becomes infinite in its format.
    """
    import gguf

    for key, tensor in stock.state_dict().items():
        if key in stock.all_tied_weights_keys:
            continue
        require_finite(key, tensor)
        weight = _to_llama_cpp_layout(key, tensor.float(), stock.config)
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


def _to_llama_cpp_layout(key: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Return a weight with its values in llama.cpp's order.

    - llama.cpp stores matrices as (out, in). GPT-2's Conv1D stores them as (in, out).
    - Rotary embeddings rotate pairs of values of a head. In Llama of Transformers a pair is (i, i +
      d/2), where d is the size of the head. In llama.cpp it is (2i, 2i + 1), so the rows of the
      query and key matrices are reordered.
    """
    if config.model_type == "gpt2":
        is_conv1d = ".c_" in key and tensor.ndim == 2
        return tensor.T.contiguous() if is_conv1d else tensor
    if "q_proj" in key:
        heads = config.num_attention_heads
    elif "k_proj" in key:
        heads = config.num_key_value_heads
    else:
        return tensor
    halves = tensor.view(heads, 2, -1, tensor.shape[1])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _split_name(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return llama.cpp's name of the tokenizer's split, or None if llama.cpp has no equal one."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    model = definition["model"]
    if model["type"] != "BPE" or definition["normalizer"] not in (None, {"type": "NFC"}):
        return None
    regex = split_points.word_regex(definition["pre_tokenizer"] or {})
    split = SPLITS.get(regex or "")
    if split is None or model["ignore_merges"] != split.ignore_merges:
        return None
    return split.name


def _add_tokenizer(
    writer: Any, stock: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Add the vocabulary, merges, special tokens and chat template of a tokenizer."""
    import gguf

    writer.add_tokenizer_model("gpt2")  # llama.cpp's name of all byte-level BPE tokenizers
    writer.add_tokenizer_pre(_split_name(tokenizer))

    texts = {token_id: text for text, token_id in tokenizer.get_vocab().items()}
    tokens = []
    kinds = []
    for token_id in range(stock.config.vocab_size):
        added_token = tokenizer.added_tokens_decoder.get(token_id)
        if token_id not in texts:
            kind = gguf.TokenType.UNUSED
        elif added_token is None:
            kind = gguf.TokenType.NORMAL
        elif added_token.special:
            kind = gguf.TokenType.CONTROL
        else:
            kind = gguf.TokenType.USER_DEFINED
        tokens.append(texts.get(token_id, f"[unused {token_id}]"))
        kinds.append(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)

    # Merges, ids of the special tokens, and the chat template come from the tokenizer's files.
    vocab = gguf.SpecialVocab(folder, load_merges=True)
    starts_with_bos = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    vocab.add_special_token = {"bos": starts_with_bos}
    end_ids = stock.generation_config.eos_token_id
    if tokenizer.chat_template and isinstance(end_ids, list):
        other_end_ids = [end_id for end_id in end_ids if end_id != tokenizer.eos_token_id]
        end_of_turn = other_end_ids[0] if other_end_ids else end_ids[0]
        vocab.special_token_ids["eot"] = end_of_turn
    vocab.add_to_gguf(writer, quiet=True)
