"""Tokenizers are loaded as their files define them, and encode deterministically."""

import json
import sys
import types

import odd_tokenizers
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import pretrained_tokenizer, split_points
from ursa_minor.data.tokens import tokenizer as tokenization

TEXT = odd_tokenizers.TEXT
HINDI = "हिन्दी में नदी का किनारा, 中文 don't 12345\n\n  two spaces "


def with_split(regex: str) -> Tokenizer:
    """Return a byte-level BPE with the components that Qwen's and Llama 3's files have."""
    backend = tokenization.train_bpe([TEXT, HINDI * 3], 400, "gpt2").backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def write_folder(folder, backend: Tokenizer, **config) -> str:
    """Write a tokenizer folder whose tokenizer_config.json has these keys."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def edit_json(folder, change) -> None:
    """Change the contents of tokenizer.json."""
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text())
    change(definition)
    path.write_text(json.dumps(definition))


@pytest.mark.parametrize(
    ("class_name", "split"),
    [("GPT2Tokenizer", split_points.QWEN35), ("Qwen2Tokenizer", split_points.LLAMA3)],
    ids=["GPT2Tokenizer", "Qwen2Tokenizer"],
)
def test_file_wins_over_class(class_name, split, tmp_path, caplog):
    # Transformers 5.23.0, huggingface/transformers#45701
    backend = with_split(split)
    name = write_folder(
        tmp_path / "tok", backend, tokenizer_class=class_name, eos_token="<|endoftext|>"
    )

    tokenizer = pretrained_tokenizer.load(name)

    expected_ids = backend.encode(HINDI, add_special_tokens=False).ids
    assert tokenization.encode_prompt(tokenizer, HINDI) == expected_ids
    assert tokenizer(HINDI)["input_ids"] == backend.encode(HINDI).ids
    assert tokenizer.eos_token == "<|endoftext|>"
    (line,) = caplog.messages
    tokenizer.save_pretrained(tmp_path / "copy")
    copy = pretrained_tokenizer.load(str(tmp_path / "copy"))
    assert tokenization.fingerprint(copy) == tokenization.fingerprint(tokenizer)
    assert class_name in line
    assert "pre_tokenizer" in line


def ignore_merges(backend: Tokenizer) -> Tokenizer:
    """Return the tokenizer with Llama 3's option that a word of the vocabulary is one token."""
    definition = json.loads(backend.to_str())
    definition["model"]["ignore_merges"] = True
    definition["model"]["vocab"]["Ġhidden"] = len(definition["model"]["vocab"]) + 1
    return Tokenizer.from_str(json.dumps(definition))


def test_file_wins_for_normalizer_decoder_and_model(tmp_path):
    backend = ignore_merges(with_split(split_points.LLAMA3))
    backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("x", "y")])
    name = write_folder(tmp_path / "tok", backend, tokenizer_class="GPT2Tokenizer")

    tokenizer = pretrained_tokenizer.load(name)

    text = "e\u0301 hidden x"
    ids = tokenization.encode_prompt(tokenizer, text)
    assert ids == backend.encode(text, add_special_tokens=False).ids
    assert tokenization.decode(tokenizer, ids) == backend.decode(ids) == "é hidden y"


def test_file_wins_for_post_processor(tmp_path):
    backend = with_split(split_points.LLAMA3)
    backend.add_special_tokens(["<|begin|>"])
    begin = ("<|begin|>", backend.token_to_id("<|begin|>"))
    backend.post_processor = processors.TemplateProcessing("<|begin|> $A", None, [begin])
    name = write_folder(
        tmp_path / "tok",
        backend,
        tokenizer_class="GPT2Tokenizer",
        eos_token="<|endoftext|>",
        bos_token="<|endoftext|>",
    )

    tokenizer = pretrained_tokenizer.load(name)

    assert tokenizer(HINDI)["input_ids"] == backend.encode(HINDI).ids


def test_model_type_and_unsuitable_class_do_not_win(tmp_path):
    backend = with_split(split_points.QWEN35)
    name = write_folder(tmp_path / "tok", backend)
    (tmp_path / "tok" / "config.json").write_text('{"model_type": "gpt2"}')
    unsuitable = write_folder(
        tmp_path / "t5", backend, tokenizer_class="T5Tokenizer", eos_token="<|endoftext|>"
    )

    tokenizer = pretrained_tokenizer.load(name)
    tokenizer_of_t5 = pretrained_tokenizer.load(unsuitable)

    assert tokenization.encode_prompt(tokenizer, HINDI) == backend.encode(HINDI).ids
    assert tokenization.encode_prompt(tokenizer_of_t5, HINDI) == backend.encode(HINDI).ids


def test_unchanged_class_is_kept_silently(tmp_path, caplog):
    backend = tokenization.train_bpe([TEXT], 300, "gpt2").backend_tokenizer
    name = write_folder(
        tmp_path / "tok", backend, tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>"
    )

    tokenizer = pretrained_tokenizer.load(name)

    assert type(tokenizer).__name__ == "GPT2Tokenizer"
    assert not caplog.messages


def test_encoding_is_deterministic(tmp_path):
    backend = tokenization.train_bpe([TEXT], 300, "gpt2").backend_tokenizer
    expected_ids = backend.encode(TEXT).ids
    backend.enable_truncation(5)
    backend.enable_padding(length=500)
    name = write_folder(tmp_path / "tok", backend)
    edit_json(tmp_path / "tok", lambda definition: definition["model"].update(dropout=0.5))

    tokenizer = pretrained_tokenizer.load(name)

    assert tokenizer(TEXT)["input_ids"] == expected_ids
    encode = tokenization.make_encoder(tokenizer)
    assert encode([TEXT])[0].tolist() == expected_ids


@pytest.mark.parametrize(
    ("token", "config"), [("</s>", {}), ("<eos>", {"tokenizer_class": "GPT2Tokenizer"})]
)
def test_only_end_of_text_name_is_used(token, config, tmp_path):
    # GPT2Tokenizer would add <|endoftext|>.
    backend = with_split(split_points.QWEN35)
    definition = backend.to_str().replace("<|endoftext|>", token)
    name = write_folder(tmp_path / "tok", Tokenizer.from_str(definition), **config)

    tokenizer = pretrained_tokenizer.load(name)

    assert tokenizer.eos_token == token
    assert tokenizer.eos_token_id == backend.token_to_id("<|endoftext|>")


def test_ambiguous_end_of_text_is_an_error(tmp_path):
    backend = with_split(split_points.QWEN35)
    backend.add_special_tokens(["</s>"])
    backend.add_tokens([AddedToken("<eos>", special=False)])
    name = write_folder(tmp_path / "tok", backend)

    with pytest.raises(BadInput) as caught:
        pretrained_tokenizer.load(name)

    message = str(caught.value)
    assert "<|endoftext|>, </s>." in message
    assert "tokenizer_config.json" in message
    assert '{"eos_token": "<|endoftext|>"}' in message


def test_sentencepiece_model_alone_is_rejected(tmp_path):
    folder = tmp_path / "tok"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")

    with pytest.raises(BadInput) as caught:
        pretrained_tokenizer.load(str(folder))

    message = str(caught.value)
    assert "tokenizer.model" in message
    assert "save_pretrained" in message


class OtherProcessor:
    """A SentencePiece processor with other ids than any tokenizer has."""

    def __init__(self, model_file: str):
        pass

    def encode(self, text: str) -> list[int]:
        return [10**6]


def test_other_sentencepiece_ids_are_rejected(tmp_path, monkeypatch):
    folder = tmp_path / "tok"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(b"")
    module = types.SimpleNamespace(SentencePieceProcessor=OtherProcessor)
    monkeypatch.setitem(sys.modules, "sentencepiece", module)
    tokenizer = odd_tokenizers.byte_level_tokenizer()
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: tokenizer)

    with pytest.raises(BadInput, match="SentencePiece"):
        pretrained_tokenizer.load(str(folder))
