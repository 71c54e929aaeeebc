"""A push keeps the edits of other authors in a model card."""

from typing import NamedTuple

import pytest
import yaml
from huggingface_hub import ModelCard

from ursa_minor.hub import card_merge, card_metadata
from ursa_minor.hub.card_merge import add_results, mark, merge
from ursa_minor.hub.card_metadata import CannotMerge


class Metric(NamedTuple):
    """A result in the metadata of a card, without its value."""

    dataset: str
    revision: str | None
    kind: str
    name: str


HELLASWAG = "Rowan/hellaswag"
ACC = Metric(HELLASWAG, "1" * 40, "acc", "acc (rule)")
ACC_OF_OTHER_REVISION = ACC._replace(revision="2" * 40)
ACC_OF_OTHERS = ACC._replace(name="5-shot")
ACC_NORM = Metric(HELLASWAG, "1" * 40, "acc_norm", "acc_norm (rule)")
LOSS = Metric("text", None, "loss", "loss")
LOSS_OF_OTHERS = LOSS._replace(name="their loss")
BOM = "\ufeff"


def model_index(*results: tuple[Metric, float]) -> list[dict]:
    """Return the metadata field model-index with these results."""
    groups = []
    for metric, value in results:
        dataset = {"name": "HellaSwag", "type": metric.dataset, "revision": metric.revision}
        row = {"type": metric.kind, "value": value, "name": metric.name}
        task = {"type": "text-generation"}
        groups.append({"task": task, "dataset": dataset, "metrics": [row]})
    return [{"name": "run", "results": groups}]


def header(metadata: dict) -> str:
    """Return the metadata block of a card. Fields that are None are omitted."""
    fields = {name: value for name, value in metadata.items() if value is not None}
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---\n"


def make_card(step: int = 1, body: str = "", **changes) -> str:
    """Return a card that a push generates for this step, with changed metadata fields."""
    metadata = {
        "license": "mit",
        "language": ["en"],
        "tags": ["ursa-minor", "mine"],
        "datasets": ["a/b"],
        "pipeline_tag": "text-generation",
        "model-index": model_index((LOSS, 3.0 - step / 10)),
    }
    return mark(f"{header(metadata | changes)}\n# Step {step}\n{body}")


def make_card_with_results(step: int, *results: tuple[Metric, float]) -> str:
    """Return a card with these results instead of the loss."""
    return make_card(step, **{"model-index": model_index(*results)})


def fields(text: str) -> dict:
    """Return the metadata of a card."""
    return card_metadata.parse(text).metadata


def results(text: str) -> list[tuple[Metric, float]]:
    """Return the results in the metadata of a card, in the format of ``model_index``."""
    groups = []
    for entry in fields(text).get("model-index", []):
        groups += entry["results"]
    found = []
    for group in groups:
        dataset = group["dataset"]
        for row in group["metrics"]:
            metric = Metric(dataset["type"], dataset.get("revision"), row["type"], row.get("name"))
            found.append((metric, row["value"]))
    return found


@pytest.mark.parametrize(
    "old", ["", f"{BOM} \n", make_card(1)], ids=["empty", "byte order mark", "unedited"]
)
def test_unedited_card_is_replaced(old):
    assert merge(make_card(2), old) == make_card(2)


def test_unedited_card_is_replaced_without_removed_fields():
    new = make_card(2, license=None, tags=["ursa-minor"])

    assert merge(new, make_card(1)) == new


def test_text_around_generated_section_is_kept():
    begin = "\n<!-- ursa-minor:begin"
    edited = make_card(1).replace(begin, f"\nAbove.\n{begin}") + "\nBelow.\n"

    merged = merge(make_card(2), edited)

    assert "\nAbove.\n" in merged
    assert merged.endswith("\nBelow.\n")
    assert "# Step 2" in merged
    assert "# Step 1" not in merged


YAML_WITH_COMMENTS = "language: no\nlicense:   'mit'   # as agreed\n\n# all tags\ntags: [x]\n"
EDITED_CARDS = {
    "text added": make_card(1) + "\nMine.\n",
    "fields changed": make_card(1).replace(
        "license: mit", "license: apache-2.0\nwidget:\n- text: Hi"
    ),
    "windows newlines": make_card(1).replace("\n", "\r\n"),
    "byte order mark": BOM + make_card(1),
    "tag added": make_card(1).replace("- mine\n", "- mine\n- theirs\n"),
    "no metadata": "# Mine\n",
    "no final newline": "# Mine, without a line break",
    "no section": "---\nlicense: mit\n---\n# Mine\n",
    "comments": f"---\n{YAML_WITH_COMMENTS}---\n# Mine\n",
    "flow mapping": "---\n{license: mit, extra: 1.10}\n---\n# Mine\n",
    "indented fields": "---\n  license: mit\n  extra: .nan\n---\n# Mine\n",
    "empty metadata": "---\n---\n",
    "leading empty lines": "\n\n---\nlicense: mit\n---",
}


@pytest.mark.parametrize("edited", EDITED_CARDS.values(), ids=EDITED_CARDS)
def test_second_merge_changes_nothing(edited):
    merged = merge(make_card(2), edited)

    assert merge(make_card(2), merged) == merged
    assert "# Step 2" in merged
    parsed = ModelCard(merged.removeprefix(BOM))
    assert parsed.data["license"] == fields(merged)["license"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("prefix", ["", BOM], ids=["no BOM", "BOM"])
def test_card_of_other_author_keeps_its_bytes(newline, prefix):
    top = [
        "---",
        "license:   'apache-2.0'   # ask me",
        "",
        "# widget",
        "widget: [{text: Hi}]",
    ]
    date = "date: 2026-01-02"
    bottom = ["# Mine ", "", "Text.  ", "", "| a |", "---"]
    old = prefix + newline.join([*top, date, "---", *bottom]) + newline

    merged = merge(make_card(1), old)

    assert merged.startswith(prefix + newline.join(top))
    assert newline.join(["", *bottom, ""]) in merged
    assert fields(merged)["license"] == "apache-2.0"
    assert fields(merged)["tags"] == ["ursa-minor", "mine"]
    assert "# Step 1" in merged
    if newline == "\r\n":
        assert "\n" not in merged.replace("\r\n", "")


@pytest.mark.parametrize(
    ("name", "edited", "new", "expected"),
    [
        ("license", "apache-2.0", "mit", "apache-2.0"),
        ("license", "apache-2.0", "gpl-3.0", "apache-2.0"),
        ("license", None, "mit", None),
        ("license", "mit", "gpl-3.0", "gpl-3.0"),
        ("license", "mit", None, None),
        ("pipeline_tag", "text2text-generation", "text-generation", "text2text-generation"),
        ("tags", ["ursa-minor", "mine", "x"], ["ursa-minor", "mine"], ["ursa-minor", "mine", "x"]),
        ("tags", ["ursa-minor"], ["ursa-minor", "mine", "new"], ["ursa-minor", "new"]),
        ("tags", ["x", "mine", "ursa-minor"], ["ursa-minor"], ["x", "ursa-minor"]),
        ("tags", None, ["ursa-minor", "mine"], None),
        ("language", ["en", "de"], ["en", "hi"], ["en", "de", "hi"]),
        ("language", "en", ["en"], "en"),
        ("datasets", ["c/d"], ["a/b"], ["c/d"]),
        ("library_name", "other", None, "other"),
    ],
)
def test_field_edited_on_hub_is_kept(name, edited, new, expected):
    old = card_metadata.parse(make_card(1))
    on_hub = header(old.metadata | {name: edited}) + old.body
    change = {name: new}

    merged = merge(make_card(2, **change), on_hub)
    merged_again = merge(make_card(3, **change), merged)

    assert fields(merged).get(name) == expected
    assert fields(merged_again).get(name) == expected


def test_results_of_others_are_kept():
    others = model_index((ACC_OF_OTHERS, 40.0), (LOSS_OF_OTHERS, 1.0))
    others[0]["results"][0]["source"] = {"url": "https://example.com", "name": "Board"}
    on_hub = add_results(make_card(1), others)
    on_hub = add_results(on_hub, model_index((ACC, 28.0)))
    assert results(on_hub) == [
        (LOSS, 2.9),
        (LOSS_OF_OTHERS, 1.0),
        (ACC_OF_OTHERS, 40.0),
        (ACC, 28.0),
    ]

    merged = merge(make_card_with_results(2, (ACC, 29.0), (ACC_NORM, 31.0)), on_hub)

    # The generated loss of step 1 is not in the new card.
    assert len(results(merged)) == 4
    assert set(results(merged)) == {
        (LOSS_OF_OTHERS, 1.0),
        (ACC_OF_OTHERS, 40.0),
        (ACC, 29.0),
        (ACC_NORM, 31.0),
    }
    assert "url: https://example.com" in merged


def test_card_without_results_removes_generated_results():
    on_hub = merge(make_card(2), make_card(1))

    merged = merge(make_card(3, **{"model-index": None}), on_hub)

    assert "model-index" not in fields(merged)


def test_later_result_replaces_the_value():
    old = (ACC, 20.0)

    text = add_results(make_card_with_results(1, old, old), model_index((ACC, 28.0)))

    assert results(text) == [(ACC, 28.0)]


def test_result_of_other_revision_is_added():
    text = make_card_with_results(1, (ACC, 28.0))

    text = add_results(text, model_index((ACC_OF_OTHER_REVISION, 27.0)))

    assert results(text) == [(ACC, 28.0), (ACC_OF_OTHER_REVISION, 27.0)]


def test_result_replaced_by_others_is_not_removed():
    text = add_results(make_card(1), model_index((LOSS, 2.5)))

    merged = merge(make_card(2, **{"model-index": None}), text)

    assert results(merged) == [(LOSS, 2.5)]


DAMAGED_CARDS = {
    "no closing": "---\nlicense: mit\n# Mine\n",
    "not yaml": "---\nlicense: [mit\n---\n# Mine\n",
    "tab": "---\na:\n\tb: 1\n---\n",
    "no mapping": "---\n- mit\n---\n",
    "twice": "---\nlicense: mit\nlicense: gpl\n---\n",
    "index": "---\nmodel-index: none\n---\n",
    "index without results": "---\nmodel-index:\n- name: x\n---\n",
    "no end": make_card(1).replace(card_merge.END, ""),
    "no begin": "Mine.\n" + card_merge.END + "\n",
    "two sections": make_card(1) + make_card(1).partition("---\n\n")[2],
    "two ends": make_card(1) + card_merge.END,
    "wrong order": card_merge.END + make_card(1).replace(card_merge.END, ""),
    "edited section": make_card(1).replace("# Step 1", "# Step 1\n\nMine."),
    "edited record": make_card(1).replace('begin {"text"', 'begin {"txt"'),
}


@pytest.mark.parametrize("text", DAMAGED_CARDS.values(), ids=DAMAGED_CARDS)
def test_damaged_card_is_rejected(text):
    with pytest.raises(CannotMerge):
        merge(make_card(2), text)


def test_deleted_section_returns_without_deleted_fields():
    on_hub = "---\nlicense: mit\n---\n\nMine.\n"

    merged = merge(make_card(2), on_hub, make_card(1))

    assert "Mine." in merged
    assert "# Step 2" in merged
    assert "tags" not in fields(merged)


@pytest.mark.parametrize(
    "name", ["-->", "<!-- ursa-minor:end -->", "ursa-minor:begin", "}--", "\u2028"]
)
def test_special_names_do_not_break_section(name):
    old = make_card(1, body=f"{name}\n", tags=[name])
    new = make_card(2, body=f"{name}\n", tags=[name])

    assert merge(new, old) == new
