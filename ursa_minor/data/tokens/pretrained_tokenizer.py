"""Load a tokenizer from a folder or the Hub, exactly as its files define it.

Transformers decides by the name of a class how some files are read. Since version 5 the classes
GPT2Tokenizer and Qwen2Tokenizer, for example, replace the pre-tokenizer of ``tokenizer.json`` by
their own (huggingface/transformers#45701). Here the file decides.
"""

import json
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ursa_minor.base import checkpoint_files, files, model_id
from ursa_minor.base.errors import BadInput, first_line
from ursa_minor.data.tokens import definition as definitions
from ursa_minor.data.tokens import tokenizer as tokenization

log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
# The components of a tokenizer.json that decide the ids of a text and the text of ids.
COMPONENTS = ("normalizer", "pre_tokenizer", "decoder", "post_processor")
# Settings that have no effect on ids or texts. ``dropout`` is switched off.
COSMETIC_SETTINGS = ("trim_offsets", "dropout")
LARGE_SETTINGS = ("vocab", "merges")  # they contain no other settings
# Names of the end-of-text token, of GPT-2, Llama 2, Llama 3 and Gemma.
END_OF_TEXT_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
# Texts that are encoded to compare a converted SentencePiece model with the original.
SENTENCEPIECE_TEXTS = (
    "The river's bank isn't stone.",
    " begins with a space",
    "two  spaces,   three, and two at the end  ",
    "lines\nand\ttabs\n\n",
    "Ein Café in Zürich: 3,50 €",
    "नमस्ते दुनिया, 中文。 ﬁne Ⅷ ½ 🙂",
    "<s> </s> <unk> ▁",
    "",
)


def load(name: str, of_model: bool = False) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer from a folder or the Hub.

    Its encoding is deterministic: dropout, truncation and padding are off.

    Args:
        name: a folder, or an id of the Hub, which may end in @REVISION. A run folder means the
            tokenizer of its model.
        of_model: whether it is the tokenizer of --model. Otherwise a recipe names it.

    Raises:
        BadInput: the tokenizer is unavailable, has no fast form, has no end-of-text token, or is a
            SentencePiece model that Transformers converts incorrectly.
    """
    option = "--model " if of_model else "tokenizer = "
    label = f"{option}{name}"
    model_folder = checkpoint_files.model_folder_of(Path(name))
    location, revision = model_id.parse(str(model_folder or name), option)
    at_revision = {"revision": revision} if revision else {}
    tokenizer = _load_with_transformers(label, location, at_revision, of_model)
    file = _find_file(location, TOKENIZER_FILE, at_revision)
    if file is None:
        _check_sentencepiece_model(label, tokenizer, location)
    else:
        backend = Tokenizer.from_file(str(file))
        tokenizer = _as_file_defines(label, tokenizer, backend, location, at_revision)
        tokenizer = _without_default_end_of_text(tokenizer, backend, location, at_revision)
    _make_deterministic(tokenizer)
    if tokenizer.eos_token_id is None:
        _set_end_of_text(label, tokenizer)
    return tokenizer


def _load_with_transformers(
    label: str, location: str, at_revision: dict[str, str], of_model: bool
) -> PreTrainedTokenizerFast:
    """Return the tokenizer that Transformers loads, after checking it. See ``load``."""
    try:
        tokenizer = _from_pretrained(location, at_revision)
    except Exception as error:  # the Hub client, the cache and the parsers raise their own errors
        model_file = _sentencepiece_file(location)
        if model_file is not None:
            raise BadInput(_sentencepiece_message(label, model_file)) from None
        fix = "Use a folder with tokenizer.json, or a Hub id that this machine can reach"
        if not of_model:
            fix += ", or train a tokenizer on the text with --tokenizer bpe"
        raise BadInput(
            f"{label}: the tokenizer cannot be loaded ({first_line(error)}). {fix}"
        ) from None
    if not getattr(tokenizer, "is_fast", False):
        raise BadInput(
            f"{label}: the tokenizer has no fast implementation. Use one with a tokenizer.json file"
        )
    # Without files of a tokenizer, Transformers creates an empty one from the config of a model.
    is_empty = set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens)
    if is_empty:
        raise BadInput(
            f"{label} contains no tokenizer. Use the one that the model was trained with: "
            f"a folder or a Hub id"
        )
    return tokenizer


def _from_pretrained(location: str, at_revision: dict[str, str]) -> PreTrainedTokenizerFast:
    """Return the tokenizer that AutoTokenizer loads.

    Some classes, such as T5Tokenizer, cannot be built from a BPE. Then the class is ignored.
    """
    from transformers import AutoTokenizer  # imports torch, which reading text does not need

    try:
        return AutoTokenizer.from_pretrained(
            location, use_fast=True, trust_remote_code=False, **at_revision
        )
    except (TypeError, ValueError):
        return PreTrainedTokenizerFast.from_pretrained(location, **at_revision)


def _find_file(location: str, name: str, at_revision: dict[str, str]) -> Path | None:
    """Return the path of a file in a folder or in the cache of the Hub, or None if missing."""
    from transformers.utils import cached_file

    try:
        path = cached_file(location, name, **at_revision)
    except OSError:
        return None
    return Path(path) if path else None


def _as_file_defines(
    label: str,
    tokenizer: PreTrainedTokenizerFast,
    backend: Tokenizer,
    location: str,
    at_revision: dict[str, str],
) -> PreTrainedTokenizerFast:
    """Return the tokenizer with the components of its tokenizer.json.

    If its class has replaced one of them, the result is a PreTrainedTokenizerFast, a class that
    replaces nothing.

    Args:
        label: the tokenizer, for the log.
        tokenizer: the tokenizer that Transformers loaded.
        backend: the tokenizer that tokenizer.json defines.
        location: a folder or an id of the Hub.
        at_revision: arguments that name the revision.
    """
    # PreTrainedTokenizerFast does not replace the model, which takes long to compare.
    is_generic = type(tokenizer) is PreTrainedTokenizerFast
    names = COMPONENTS if is_generic else (*COMPONENTS, "model")
    expected = _components(backend, names)
    replaced = _differences(_components(tokenizer.backend_tokenizer, names), expected)
    if not replaced:
        return tokenizer
    special_tokens = {}
    for key, token in tokenizer.special_tokens_map.items():
        if isinstance(token, str):  # others are lists of additional special tokens
            special_tokens[key] = token
    generic = PreTrainedTokenizerFast.from_pretrained(location, **at_revision, **special_tokens)
    for component in _differences(_components(generic.backend_tokenizer, names), expected):
        setattr(generic.backend_tokenizer, component, getattr(backend, component))
    class_name = type(tokenizer).__name__
    names_of_replaced = " and ".join(replaced)
    log.info(
        f"{label}: the class {class_name} would replace the {names_of_replaced} of "
        f"{TOKENIZER_FILE}. The file is used"
    )
    return generic


def _without_default_end_of_text(
    tokenizer: PreTrainedTokenizerFast,
    backend: Tokenizer,
    location: str,
    at_revision: dict[str, str],
) -> PreTrainedTokenizerFast:
    """Return the tokenizer with the end-of-text token of its file instead of that of its class.

    A class such as GPT2Tokenizer adds ``<|endoftext|>`` if its files state no such token. The
    arguments are those of ``_as_file_defines``.
    """
    config_file = _find_file(location, CONFIG_FILE, at_revision)
    is_stated = config_file is not None and "eos_token" in files.read_json(config_file)
    is_in_file = backend.token_to_id(str(tokenizer.eos_token)) is not None
    candidates = _end_of_text_candidates(backend)
    if is_stated or is_in_file or tokenizer.eos_token is None or len(candidates) != 1:
        return tokenizer
    return PreTrainedTokenizerFast.from_pretrained(location, **at_revision, eos_token=candidates[0])


def _end_of_text_candidates(backend: Tokenizer) -> list[str]:
    """Return the special tokens that are named like an end-of-text token."""
    added_tokens = backend.get_added_tokens_decoder().values()
    special_tokens = [token.content for token in added_tokens if token.special]
    return [token for token in special_tokens if token in END_OF_TEXT_NAMES]


def _components(backend: Tokenizer, names: Sequence[str]) -> dict[str, Any]:
    """Return components of a tokenizer by name, without settings that have no effect."""
    components = {}
    for name in names:
        if name == "model":
            component = definitions.complete(backend)["model"]
        else:
            component = definitions.component(backend, name)
        components[name] = _without_cosmetics(component)
    # A template without special tokens, which Transformers adds, has no effect.
    template = components["post_processor"]
    if template and template["type"] == "TemplateProcessing" and not template["special_tokens"]:
        components["post_processor"] = None
    # The decoder ByteLevel has settings, but ignores them.
    decoder = components["decoder"]
    if decoder and decoder["type"] == "ByteLevel":
        components["decoder"] = {"type": "ByteLevel"}
    model = components.get("model", {})
    if not model.get("unk_token"):
        model.pop("fuse_unk", None)
    return components


def _without_cosmetics(value: Any) -> Any:
    """Return a part of the JSON of a tokenizer without settings that have no effect.

    An empty text, such as a prefix of words, has the same effect as null.
    """
    if isinstance(value, dict) and "type" in value:
        settings = {}
        for key, setting in value.items():
            if key in LARGE_SETTINGS:
                settings[key] = setting
            elif key not in COSMETIC_SETTINGS:
                settings[key] = None if setting == "" else _without_cosmetics(setting)
        return settings
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_cosmetics(element) for element in value]
    return value


def _differences(components: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names of the components that differ."""
    return [name for name, value in expected.items() if components[name] != value]


def _make_deterministic(tokenizer: PreTrainedTokenizerFast) -> None:
    """Switch off dropout, truncation and padding, so that a text always has the same ids."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None


def _set_end_of_text(label: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Use the only special token that is named like an end-of-text token.

    Raises:
        BadInput: there is none, or there are several.
    """
    special_tokens = [
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special
    ]
    candidates = _end_of_text_candidates(tokenizer.backend_tokenizer)
    if len(candidates) == 1:
        tokenizer.eos_token = candidates[0]
        return
    example = (candidates or special_tokens or [tokenization.END_OF_TEXT])[0]
    line = json.dumps({"eos_token": example}, ensure_ascii=False)
    problem = "the tokenizer has no end-of-text (eos) token, which must separate documents"
    if candidates:
        problem = f"several special tokens may be the end-of-text token: {', '.join(candidates)}"
    raise BadInput(
        f"{label}: {problem}. Add the name of the token to {CONFIG_FILE}, for example {line}. It "
        f"must be a special token of {TOKENIZER_FILE}"
    )


def _sentencepiece_file(location: str) -> Path | None:
    """Return the SentencePiece model of a folder without tokenizer.json, or None."""
    folder = Path(location)
    if not folder.is_dir() or (folder / TOKENIZER_FILE).exists():
        return None
    return next(iter(sorted(folder.glob("*.model"))), None)


def _check_sentencepiece_model(
    label: str, tokenizer: PreTrainedTokenizerFast, location: str
) -> None:
    """Check that a converted SentencePiece model encodes texts like SentencePiece.

    Transformers ignores some settings of the model, such as ``add_dummy_prefix``.

    Raises:
        BadInput: the ids of a text differ.
    """
    model_file = _sentencepiece_file(location)
    if model_file is None:
        return
    try:
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_file=str(model_file))
    except ImportError:
        return  # Transformers cannot convert such a model without this package
    except (RuntimeError, OSError):
        return  # another format with this suffix, for example tiktoken's
    encode = tokenization.Encoder(tokenizer)
    for text in SENTENCEPIECE_TEXTS:
        if not _is_encoded_as(encode, text, processor.encode(text)):
            raise BadInput(_sentencepiece_message(label, model_file))


def _is_encoded_as(encode: tokenization.Encoder, text: str, ids: Sequence[int]) -> bool:
    """Return whether an encoder returns these ids for a text."""
    try:
        return encode([text])[0].tolist() == list(ids)
    except BadInput:
        return False


def _sentencepiece_message(label: str, model_file: Path) -> str:
    """Return the message for a folder whose only tokenizer is a SentencePiece model."""
    folder = str(model_file.parent)
    code = (
        f"from transformers import AutoTokenizer; "
        f"AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder + '-converted'!r})"
    )
    return (
        f"{label} contains a SentencePiece model ({model_file.name}) but no {TOKENIZER_FILE}. "
        f"Convert it, and use the new folder. The new tokenizer encodes the beginning of a text "
        f"differently from SentencePiece, so do not combine it with token files that "
        f"SentencePiece encoded. Commands: pip install sentencepiece protobuf && "
        f"python -c {shlex.quote(code)}"
    )
