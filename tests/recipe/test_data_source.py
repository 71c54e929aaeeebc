"""Flags that replace a recipe's data source or model, and flags without effect."""

import logging

import pytest
import yaml
from conftest import RECIPE

from ursa_minor.base.errors import BadInput
from ursa_minor.recipe import keys, loading

COMMON = yaml.safe_load(RECIPE) | {"tokenizer": "owner/tokenizer"}
del COMMON["validation_fraction"]
HUB = {
    "dataset_name": "owner/name",
    "dataset_config_name": "subset",
    "dataset_revision": "v1",
    "text_column": "body",
    "validation_tokens": 1000,
}
FILES = {"data_files": ["a.txt"], "validation_files": ["b.txt"]}
SHARDS = {"data_dir": "shards"}
MIXTURE = {
    "sources": [
        {"weight": 1, "dataset_name": "owner/one", "text_column": "body"},
        {"weight": 2, "data_files": ["two.jsonl"]},
    ]
}
STDLIB = {"dataset_name": "python_stdlib", "validation_fraction": 0.2}
SOURCES = {"hub": HUB, "files": FILES, "shards": SHARDS, "mixture": MIXTURE, "stdlib": STDLIB}


def load(folder, stated, modes=(), **flags):
    """Load a recipe with these data keys and flags."""
    path = folder / "mine.yaml"
    values = COMMON | stated
    path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
    return loading.load_recipe(path, flags, modes)


def error_of(folder, stated, **flags):
    """Return the only line of the error that the recipe and flags cause."""
    with pytest.raises(BadInput) as caught:
        load(folder, stated, **flags)
    (message,) = caught.value.lines
    return message


def changed_source_keys(recipe):
    """Return the keys of the data source that do not have their default values."""
    values = keys.to_dict(recipe)
    changed = {}
    for name in keys.SOURCE_KEYS:
        if values[name] != keys.FIELDS[name].default:
            changed[name] = values[name]
    return changed


def names_at_end(message):
    """Return the names that a note lists after its last colon."""
    return message.rpartition(": ")[2].split(", ")


# Flags that name a data source.


@pytest.mark.parametrize(
    "flag", [{"dataset_name": "me/mine"}, {"data_files": ["c.jsonl"]}, {"data_dir": "d"}]
)
@pytest.mark.parametrize("source_name", SOURCES)
def test_source_flag_replaces_whole_recipe_source(tmp_path, caplog, source_name, flag):
    caplog.set_level(logging.INFO, "ursa_minor")
    stated = SOURCES[source_name]
    flag_name = next(iter(flag))

    recipe = load(tmp_path, stated, **flag)

    assert changed_source_keys(recipe) == flag
    note = caplog.messages[0]
    assert note.startswith(f"--{flag_name} replaces the recipe's data source")
    assert set(names_at_end(note)) == set(stated) & set(keys.SOURCE_KEYS)
    copy = load(tmp_path, yaml.safe_load(keys.as_yaml(recipe)))
    assert changed_source_keys(copy).keys() == flag.keys()


@pytest.mark.parametrize(
    ("stated", "flags"),
    [
        (HUB, {"dataset_name": "owner/name"}),
        (FILES, {"data_files": ["a.txt"]}),
        (SHARDS, {"data_dir": "shards"}),
        (HUB, {"dataset_config_name": "other"}),
    ],
)
def test_repeated_source_flag_replaces_nothing(tmp_path, caplog, stated, flags):
    caplog.set_level(logging.INFO, "ursa_minor.recipe.data_source")
    without_flags = load(tmp_path, stated)

    recipe = load(tmp_path, stated, **flags)

    assert changed_source_keys(recipe) == changed_source_keys(without_flags) | flags
    assert not caplog.messages


@pytest.mark.parametrize("empty", [[], None])
def test_empty_source_is_replaced_without_note(tmp_path, caplog, empty):
    caplog.set_level(logging.INFO, "ursa_minor")

    recipe = load(tmp_path, {"data_files": empty}, data_files=["a.txt"])

    assert recipe.data.data_files == ["a.txt"]
    assert not [message for message in caplog.messages if "are ignored" in message]


def test_same_file_under_another_path_is_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()

    recipe = load(tmp_path, FILES, data_files=[str(tmp_path / "a.txt")])

    assert recipe.data.validation_files == ["b.txt"]


def test_replaced_source_keeps_other_data_keys(tmp_path):
    stated = HUB | {"limit_tokens": 5000, "shard_tokens": 100, "stream_keep": "consumed"}

    data = load(tmp_path, stated, data_files=["c.jsonl"]).data

    assert data.tokenizer == "owner/tokenizer"
    assert data.limit_tokens == 5000
    assert data.shard_tokens == 100
    assert data.stream_keep == "consumed"
    assert data.validation_tokens == 1000  # also has an effect on a table


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"data_files": [], "dataset_name": "owner/name"}, {"dataset_name": "owner/name"}),
        ({"data_files": [], "sources": [], "data_dir": "d"}, {"data_dir": "d"}),
    ],
)
def test_empty_list_is_no_data_source(tmp_path, stated, expected):
    recipe = load(tmp_path, stated)

    changed = changed_source_keys(recipe)
    assert {name: value for name, value in changed.items() if value} == expected


def test_column_of_recipe_without_source_is_kept(tmp_path):
    stated = {"data_files": [], "text_column": "body"}

    recipe = load(tmp_path, stated, data_files=["c.jsonl"])

    assert recipe.data.text_column == "body"


@pytest.mark.parametrize(
    ("stated", "flags", "names"),
    [
        (HUB | SHARDS, {}, "data_dir and dataset_name"),
        (HUB | FILES, {}, "data_files and dataset_name"),
        (MIXTURE | {"dataset_name": "owner/name"}, {}, "sources and dataset_name"),
        (HUB, {"data_dir": "d", "data_files": ["f"]}, "--data_dir and --data_files"),
        (HUB, {"dataset_name": "me/mine", "data_files": ["f"]}, "--data_files and --dataset_name"),
        ({"sources": [{"weight": 1, **SHARDS, **FILES}]}, {}, "data_dir and data_files"),
        (HUB | FILES, {"data_files": ["c.txt"]}, "data_files and dataset_name"),
    ],
)
def test_two_data_sources_are_rejected(tmp_path, caplog, stated, flags, names):
    caplog.set_level(logging.INFO, "ursa_minor")

    message = error_of(tmp_path, stated, **flags)

    assert f"{names} are different data sources" in message
    assert not caplog.messages


# Flags and keys without effect.


@pytest.mark.parametrize(
    ("stated", "flags", "reason"),
    [
        (FILES, {"validation_tokens": "1000"}, "text files as the data source"),
        (FILES, {"text_column": "body"}, "text files as the data source"),
        (FILES, {"text_column": "text"}, "text files as the data source"),
        (FILES, {"token_column": "ids"}, "text files as the data source"),
        (FILES, {"validation_fraction": "0.2"}, "validation_files = b.txt"),
        (FILES, {"dataset_config_name": "subset"}, "text files as the data source"),
        ({"data_files": ["a.jsonl"]}, {"validation_fraction": "0.5"}, "tables as the data source"),
        (
            {"data_files": ["https://h/a.jsonl.gz?x=1"]},
            {"validation_fraction": "0.5"},
            "tables as the data source",
        ),
        ({"data_files": ["a.csv"]}, {"document_separator": "---"}, "tables as the data source"),
        (HUB, {"validation_fraction": "0.5"}, "a Hub data set"),
        (HUB, {"validation_files": ["v.txt"]}, "a Hub data set"),
        (HUB | {"token_column": "ids"}, {"text_column": "body"}, "token_column = ids"),
        (STDLIB, {"dataset_revision": "v1"}, "python_stdlib as the data source"),
        (STDLIB, {"text_column": "body"}, "python_stdlib as the data source"),
        (SHARDS, {"limit_tokens": "1000"}, "local token shards"),
        (SHARDS, {"shard_tokens": "1000"}, "local token shards"),
        (SHARDS, {"prepared_data_dir": "p"}, "local token shards"),
        (HUB, {"data_dir": "hf://datasets/a/b", "text_column": "body"}, "token files of the Hub"),
        (
            FILES,
            {"tokenizer": "characters", "tokenizer_vocab_size": "777"},
            "tokenizer = characters",
        ),
        (FILES, {"tokenizer": "characters", "tokenizer_split": "gpt2"}, "tokenizer = characters"),
        (FILES, {"sample_top_p": "0.9", "sample_temperature": "0"}, "sample_temperature = 0"),
        (FILES, {"sample_tokens": "9", "sample_steps": "0"}, "sample_steps = 0"),
        (FILES, {"eval_tokens": "320", "eval_steps": "0"}, "eval_steps = 0"),
        (FILES, {"task_limit": "5"}, "task_steps = 0"),
        (FILES, {"tags": ["a"]}, "report_to = none and push_to_hub = false"),
        (FILES, {"project_name": "a"}, "report_to = none"),
        (FILES, {"hub_model_id": "a"}, "push_to_hub = false"),
        (FILES, {"hub_private_repo": "false"}, "push_to_hub = false"),
        (FILES, {"hub_strategy": "end"}, "push_to_hub = false"),
        # In a mixture a flag needs a source that does not state the key.
        (MIXTURE, {"validation_files": ["v.txt"]}, "sources, none of which takes this key"),
        (MIXTURE, {"dataset_config_name": "subset"}, "sources, none of which takes this key"),
        (
            {"sources": [MIXTURE["sources"][0]]},
            {"text_column": "body"},
            "sources, none of which takes this key",
        ),
        (MIXTURE, {"validation_fraction": "0.5"}, "a Hub data set"),
    ],
)
def test_flag_without_effect_is_rejected(tmp_path, stated, flags, reason):
    message = error_of(tmp_path, stated, **flags)

    assert "has no effect with" in message
    assert reason in message
    assert "Leave it out" in message


def test_separator_of_other_source_is_rejected(tmp_path):
    separator = {"document_separator": "<|endoftext|>"}
    text = {"weight": 1, "data_files": ["a.txt"], "document_separator": r"\n"}

    for stated in (
        HUB | separator,
        {"data_files": ["a.jsonl"]} | separator,
        {"sources": [text, MIXTURE["sources"][1] | separator]},
    ):
        message = error_of(tmp_path, stated)
        assert "document_separator = <|endoftext|>" in message
        assert "has no effect" in message

    recipe = load(tmp_path, {"sources": [text, text | separator]})
    separators = [source.document_separator for source in recipe.data.resolved_sources]
    assert separators == [r"\n", "<|endoftext|>"]


def test_separator_of_white_space_is_rejected(tmp_path):
    for separator in ("", " ", r" \t"):
        message = error_of(tmp_path, {"data_files": ["a.txt"]}, document_separator=separator)
        assert "document_separator" in message
        assert "blank_line" in message


@pytest.mark.parametrize(
    ("separator", "suggestion"), [("blank-line", "blank_line"), (r"\r\n", r"\n")]
)
def test_misspelled_separator_is_rejected(tmp_path, separator, suggestion):
    message = error_of(tmp_path, {"data_files": ["a.txt"]}, document_separator=separator)

    assert "document_separator" in message
    assert suggestion in message


@pytest.mark.parametrize(
    ("stated", "flags"),
    [
        (MIXTURE, {"text_column": "content"}),
        (MIXTURE, {"validation_tokens": "500"}),
        (MIXTURE, {"limit_tokens": "500"}),
        (HUB, {"data_files": ["a.jsonl"], "text_column": "content"}),
        ({"data_files": ["a.jsonl"]}, {"validation_files": ["v.jsonl"]}),
        (FILES, {"tokenizer": "bpe", "tokenizer_vocab_size": "777"}),
        (FILES, {"push_to_hub": "true", "tags": ["a"]}),
        (FILES, {"report_to": ["wandb"], "tags": ["a"]}),
    ],
)
def test_flag_with_effect_is_accepted(tmp_path, stated, flags):
    recipe = load(tmp_path, stated, **flags)

    values = keys.to_dict(recipe)
    for name, text in flags.items():
        assert str(values[name]).lower() == str(text).lower()


def test_pattern_is_classified_by_first_match(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").touch()
    flags = {"data_files": ["data/*"], "validation_fraction": "0.5"}

    message = error_of(tmp_path, HUB, **flags)

    assert "tables as the data source" in message


def test_eval_only_uses_flags_without_eval_steps(tmp_path):
    flags = {"eval_tokens": "320", "eval_steps": "0", "tasks": ["piqa"], "task_limit": "5"}

    recipe = load(tmp_path, FILES, modes=["eval_only"], **flags)

    assert recipe.evaluation.eval_tokens == 320
    assert recipe.evaluation.task_limit == 5


LLAMA = {
    "architecture": "llama",
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}


@pytest.mark.parametrize(
    ("stated", "flags", "dropped"),
    [
        (
            {"optimizer": "muon", "muon_momentum": 0.5},
            {"optimizer": "adamw"},
            {"muon_momentum": 0.95},
        ),
        (
            {"lr_scheduler_type": "wsd", "decay_ratio": 0.5},
            {"lr_scheduler_type": "cosine"},
            {"decay_ratio": 0.2},
        ),
        (
            LLAMA,
            {"architecture": "gpt2"},
            {"num_key_value_heads": None, "tie_word_embeddings": None, "rope_theta": None},
        ),
        ({"validation_tokens": 7}, {"data_files": ["a.txt"]}, {"validation_tokens": 10_485_760}),
    ],
    ids=["optimizer", "schedule", "architecture", "data"],
)
def test_recipe_key_without_effect_is_dropped(tmp_path, caplog, stated, flags, dropped):
    caplog.set_level(logging.INFO, "ursa_minor")

    recipe = load(tmp_path, HUB | {"text_column": None} | stated, **flags)

    values = keys.to_dict(recipe)
    assert {name: values[name] for name in dropped} == dropped
    notes = [message for message in caplog.messages if message.startswith("With these flags")]
    (note,) = notes
    assert names_at_end(note) == list(dropped)


def test_other_recipe_key_without_effect_is_kept(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ursa_minor.recipe.data_source")

    recipe = load(tmp_path, HUB | {"decay_ratio": 0.5}, seed="3")

    assert recipe.schedule.decay_ratio == 0.5
    assert not caplog.messages


# Pretrained models.


def test_init_from_replaces_model_and_tokenizer(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ursa_minor.recipe.data_source")
    stated = HUB | {"initializer_range": 0.1, "tokenizer": "bpe", "tokenizer_vocab_size": 999}

    recipe = load(tmp_path, stated, init_from="owner/model")

    assert recipe.data.tokenizer == "owner/model"
    assert recipe.data.tokenizer_vocab_size == 4096
    for name in keys.MODEL_KEYS:
        assert getattr(recipe.model, name) is None
    assert recipe.model.sequence_length == COMMON["sequence_length"]
    assert recipe.model.resid_pdrop == COMMON["resid_pdrop"]
    (note,) = caplog.messages
    assert note.startswith("--init_from replaces")
    assert names_at_end(note) == [
        "tokenizer",
        "tokenizer_vocab_size",
        "initializer_range",
        "n_layer",
        "n_head",
        "n_embd",
        "vocab_size",
    ]


def test_init_from_keeps_other_flags(tmp_path):
    flags = {"init_from": "owner/model", "tokenizer": "owner/other", "n_layer": "24"}

    recipe = load(tmp_path, HUB, **flags)

    assert recipe.data.tokenizer == "owner/other"
    assert recipe.model.n_layer == 24


def test_repeated_init_from_keeps_recipe_tokenizer(tmp_path):
    stated = HUB | {"init_from": "owner/model", "tokenizer": "owner/other"}

    recipe = load(tmp_path, stated, init_from="owner/model")

    assert recipe.data.tokenizer == "owner/other"
