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
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from ursa_minor.base.errors import BadInput
from ursa_minor.data.tokens import pretrained_tokenizer, split_points
from ursa_minor.data.tokens import tokenizer as tokenization

TEXT = odd_tokenizers.TEXT
HINDI = "हिन्दी में नदी का किनारा, 中文 don't 12345\n\n  two spaces "
# Regexes of other models, which the classes GPT2Tokenizer and Qwen2Tokenizer would replace.
SPLITS = {
    "qwen35": split_points.QWEN35,
    "llama3": split_points.LLAMA3,
    "o200k": split_points.O200K,
}


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


@pytest.mark.parametrize("class_name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize("split", SPLITS)
def test_file_wins_over_class(split, class_name, tmp_path, caplog):
    # Transformers 5.23.0, huggingface/transformers#45701
    backend = with_split(SPLITS[split])
    name = write_folder(
        tmp_path / "tok", backend, tokenizer_class=class_name, eos_token="<|endoftext|>"
    )

    tokenizer = pretrained_tokenizer.load(name)

    expected_ids = backend.encode(HINDI, add_special_tokens=False).ids
    assert tokenization.encode_prompt(tokenizer, HINDI) == expected_ids
    assert tokenizer(HINDI)["input_ids"] == backend.encode(HINDI).ids
    assert tokenizer.eos_token == "<|endoftext|>"
    (line,) = caplog.messages
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


def test_config_without_class_does_not_win(tmp_path):
    backend = with_split(split_points.QWEN35)
    name = write_folder(tmp_path / "tok", backend)
    (tmp_path / "tok" / "config.json").write_text('{"model_type": "gpt2"}')

    tokenizer = pretrained_tokenizer.load(name)

    assert tokenization.encode_prompt(tokenizer, HINDI) == backend.encode(HINDI).ids


def test_saved_copy_is_read_like_its_file(tmp_path):
    backend = with_split(split_points.QWEN35)
    name = write_folder(tmp_path / "tok", backend, tokenizer_class="GPT2Tokenizer")
    tokenizer = pretrained_tokenizer.load(name)

    tokenizer.save_pretrained(tmp_path / "copy")
    copy = pretrained_tokenizer.load(str(tmp_path / "copy"))

    assert type(copy) is PreTrainedTokenizerFast
    assert tokenization.fingerprint(copy) == tokenization.fingerprint(tokenizer)


def test_unchanged_class_is_kept_silently(tmp_path, caplog):
    backend = tokenization.train_bpe([TEXT], 300, "gpt2").backend_tokenizer
    name = write_folder(
        tmp_path / "tok", backend, tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>"
    )

    tokenizer = pretrained_tokenizer.load(name)

    assert type(tokenizer).__name__ == "GPT2Tokenizer"
    assert not caplog.messages


@pytest.mark.parametrize("setting", ["dropout", "truncation", "padding"])
def test_encoding_is_deterministic(setting, tmp_path):
    backend = tokenization.train_bpe([TEXT], 300, "gpt2").backend_tokenizer
    expected_ids = backend.encode(TEXT).ids
    if setting == "truncation":
        backend.enable_truncation(5)
    if setting == "padding":
        backend.enable_padding(length=500)
    name = write_folder(tmp_path / "tok", backend)
    if setting == "dropout":
        edit_json(tmp_path / "tok", lambda definition: definition["model"].update(dropout=0.5))

    tokenizer = pretrained_tokenizer.load(name)

    assert tokenizer(TEXT)["input_ids"] == expected_ids
    encode = tokenization.make_encoder(tokenizer)
    assert encode([TEXT])[0].tolist() == expected_ids


@pytest.mark.parametrize("token", pretrained_tokenizer.END_OF_TEXT_NAMES)
def test_only_end_of_text_name_is_used(token, tmp_path):
    backend = with_split(split_points.QWEN35)
    definition = backend.to_str().replace("<|endoftext|>", token)
    name = write_folder(tmp_path / "tok", Tokenizer.from_str(definition))

    tokenizer = pretrained_tokenizer.load(name)

    assert tokenizer.eos_token == token
    assert tokenizer.eos_token_id == backend.token_to_id("<|endoftext|>")


@pytest.mark.parametrize("other", ["</s>", "<|im_end|>"])
def test_ambiguous_end_of_text_is_an_error(other, tmp_path):
    backend = with_split(split_points.QWEN35)
    backend.add_special_tokens([other])
    if other not in pretrained_tokenizer.END_OF_TEXT_NAMES:
        backend = Tokenizer.from_str(backend.to_str().replace("<|endoftext|>", "<|stop|>"))
    name = write_folder(tmp_path / "tok", backend)

    with pytest.raises(BadInput) as caught:
        pretrained_tokenizer.load(name)

    message = str(caught.value)
    assert "tokenizer_config.json" in message
    assert '{"eos_token": "' in message


def test_ordinary_token_is_not_end_of_text(tmp_path):
    backend = Tokenizer(models.BPE({"a": 0}, []))
    backend.add_tokens([AddedToken("</s>", special=False)])
    name = write_folder(tmp_path / "tok", backend)

    with pytest.raises(BadInput, match="eos_token"):
        pretrained_tokenizer.load(name)


def test_sentencepiece_model_alone_is_rejected(tmp_path):
    folder = tmp_path / "tok"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")

    with pytest.raises(BadInput) as caught:
        pretrained_tokenizer.load(str(folder))

    message = str(caught.value)
    assert "tokenizer.model" in message
    assert "save_pretrained" in message


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
def test_sentencepiece_ids_decide(add_dummy_prefix, tmp_path):
    # Transformers 5.23.0 ignores add_dummy_prefix of a model without a tokenizer class.
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece")
    folder = tmp_path / "tok"
    folder.mkdir()
    (tmp_path / "text.txt").write_text("the river stone bank isn't 123 é\n" * 200)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix,
        minloglevel=2,
    )

    if add_dummy_prefix:
        with pytest.raises(BadInput, match="SentencePiece"):
            pretrained_tokenizer.load(str(folder))
    else:
        assert pretrained_tokenizer.load(str(folder)).eos_token == "</s>"


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
