"""A push keeps what others wrote in a model card."""

import pytest
import yaml
from huggingface_hub import ModelCard

from ursa_minor.hub import card_merge, card_metadata
from ursa_minor.hub.card_merge import add_results, mark, merge
from ursa_minor.hub.card_metadata import CannotMerge


def index(*values: tuple, name: str = "run") -> list[dict]:
    """A model-index of (data set, revision, metric type, metric name, value)."""
    groups = [
        {
            "task": {"type": "text-generation"},
            "dataset": {"name": "HellaSwag", "type": data, "revision": revision},
            "metrics": [{"type": kind, "value": value, "name": metric}],
        }
        for data, revision, kind, metric, value in values
    ]
    return [{"name": name, "results": groups}]


ACC = ("Rowan/hellaswag", "1" * 40, "acc", "acc (rule)")
NORM = ("Rowan/hellaswag", "1" * 40, "acc_norm", "acc_norm (rule)")
LOSS = ("text", None, "loss", "loss")
FIELDS = {"license": "mit", "language": ["en"], "tags": ["ursa-minor", "mine"], "datasets": ["a/b"]}


def card(step: int = 1, body: str = "", **changes) -> str:
    """A generated card; a field that is None is left out."""
    fields = {
        **FIELDS,
        "pipeline_tag": "text-generation",
        "model-index": index((*LOSS, 3.0 - step / 10)),
    }
    fields = {name: value for name, value in {**fields, **changes}.items() if value is not None}
    header = yaml.safe_dump(fields, sort_keys=False)
    return mark(f"---\n{header}---\n\n# Step {step}\n{body}")


def fields(text: str) -> dict:
    return card_metadata.parse(text).metadata


def values(text: str) -> list[tuple]:
    """The results of a card, as ``index`` takes them."""
    found = []
    for entry in fields(text).get("model-index", []):
        for group in entry["results"]:
            data = group["dataset"]
            for value in group["metrics"]:
                found.append(
                    (
                        data["type"],
                        data.get("revision"),
                        value["type"],
                        value.get("name"),
                        value["value"],
                    )
                )
    return found


def test_card_that_nobody_edited_becomes_the_new_one():
    assert merge(card(2), "") == merge(card(2), "\ufeff \n") == merge(card(2), card(1)) == card(2)
    assert merge(card(2, license=None, tags=["ursa-minor"]), card(1)) == card(
        2, license=None, tags=["ursa-minor"]
    )


def test_text_around_our_section_is_kept():
    edited = (
        card(1).replace("\n<!-- ursa-minor:begin", "\nAbove.\n\n<!-- ursa-minor:begin")
        + "\nBelow.\n"
    )
    merged = merge(card(2), edited)
    assert "\nAbove.\n" in merged and merged.endswith("\nBelow.\n")
    assert "# Step 2" in merged and "# Step 1" not in merged


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text + "\nMine.\n",
        lambda text: text.replace("license: mit", "license: apache-2.0\nwidget:\n- text: Hi"),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\ufeff" + text,
        lambda text: text.replace("- mine\n", "- mine\n- theirs\n"),
        lambda text: "# Mine\n",
        lambda text: "# Mine, without a line break",
        lambda text: "---\nlicense: mit\n---\n# Mine\n",
        lambda text: (
            "---\nlanguage: no\nlicense:   'mit'   # as agreed\n\n# all tags\ntags: [x]\n---\n# Mine\n"
        ),
        lambda text: "---\n{license: mit, extra: 1.10}\n---\n# Mine\n",
        lambda text: "---\n  license: mit\n  extra: .nan\n---\n# Mine\n",
        lambda text: "---\n---\n",
        lambda text: "\n\n---\nlicense: mit\n---",
    ],
)
def test_merging_again_changes_nothing(edit):
    merged = merge(card(2), edit(card(1)))
    assert merge(card(2), merged) == merged
    assert "# Step 2" in merged
    assert ModelCard(merged.removeprefix("\ufeff")).data["license"] == fields(merged)["license"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark_of_utf8", ["", "\ufeff"])
def test_foreign_card_is_kept_byte_for_byte(newline, mark_of_utf8):
    lines = [
        "---",
        "license:   'apache-2.0'   # ask me",
        "",
        "# widget",
        "widget: [{text: Hi}]",
        "date: 2026-01-02",
    ]
    lines += ["---", "# Mine ", "", "Text.  ", "", "| a |", "---"]
    foreign = mark_of_utf8 + newline.join(lines) + newline
    merged = merge(card(1), foreign)
    head, _, rest = foreign.partition(f"date: 2026-01-02{newline}")
    assert merged.startswith(head) and rest.partition("---")[2] in merged
    assert fields(merged)["license"] == "apache-2.0"
    assert fields(merged)["tags"] == ["ursa-minor", "mine"]
    assert "# Step 1" in merged and (newline == "\n" or "\n" not in merged.replace("\r\n", ""))


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
def test_field_that_was_edited_on_the_hub_stays(name, edited, new, expected):
    on_hub = {**fields(card(1)), name: edited}
    header = yaml.safe_dump({key: value for key, value in on_hub.items() if value is not None})
    text = f"---\n{header}---\n{card_metadata.parse(card(1)).body}"
    merged = merge(card(2, **{name: new}), text)
    assert fields(merged).get(name) == expected
    assert fields(merge(card(3, **{name: new}), merged)).get(name) == expected


def test_results_of_others_are_kept_and_ours_replaced():
    theirs = index((*ACC[:3], "5-shot", 40.0), (*LOSS[:3], "their loss", 1.0))
    theirs[0]["results"][0]["source"] = {"url": "https://example.com", "name": "Board"}
    text = add_results(card(1), theirs)
    text = add_results(text, index((*ACC, 28.0)))
    assert values(text) == [
        (*LOSS, 2.9),
        (*LOSS[:3], "their loss", 1.0),
        (*ACC[:3], "5-shot", 40.0),
        (*ACC, 28.0),
    ]
    merged = merge(card(2, **{"model-index": index((*ACC, 29.0), (*NORM, 31.0))}), text)
    assert [value for value in values(merged) if value[2] == "loss"] == [
        (*LOSS[:3], "their loss", 1.0)
    ]
    assert {value for value in values(merged) if value[0] != "text"} == {
        (*ACC[:3], "5-shot", 40.0),
        (*ACC, 29.0),
        (*NORM, 31.0),
    }
    assert "url: https://example.com" in merged
    assert (
        fields(merge(card(3, **{"model-index": None}), merge(card(2), card(1)))).get("model-index")
        is None
    )


def test_second_push_replaces_the_value():
    old = (*ACC, 20.0)
    text = add_results(card(1, **{"model-index": index(old, old)}), index((*ACC, 28.0)))
    assert values(text) == [(*ACC, 28.0)]
    other_revision = (ACC[0], "2" * 40, *ACC[2:])
    assert values(add_results(text, index((*other_revision, 27.0)))) == [
        (*ACC, 28.0),
        (*other_revision, 27.0),
    ]


def test_result_that_others_replaced_outlives_ours():
    text = add_results(card(1), index((*LOSS, 2.5)))
    assert values(merge(card(2, **{"model-index": None}), text)) == [(*LOSS, 2.5)]


HEADER = "license: mit\n"
DAMAGED = {
    "no closing": "---\nlicense: mit\n# Mine\n",
    "not yaml": "---\nlicense: [mit\n---\n# Mine\n",
    "tab": "---\na:\n\tb: 1\n---\n",
    "no mapping": "---\n- mit\n---\n",
    "twice": "---\nlicense: mit\nlicense: gpl\n---\n",
    "index": "---\nmodel-index: none\n---\n",
    "index without results": "---\nmodel-index:\n- name: x\n---\n",
    "no end": card(1).replace(card_merge.END, ""),
    "no begin": "Mine.\n" + card_merge.END + "\n",
    "two sections": card(1) + card(1).partition("---\n\n")[2],
    "two ends": card(1) + card_merge.END,
    "wrong order": card_merge.END + card(1).replace(card_merge.END, ""),
    "edited section": card(1).replace("# Step 1", "# Step 1\n\nMine."),
    "edited record": card(1).replace('begin {"text"', 'begin {"txt"'),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_damaged_card_is_left_alone(text):
    with pytest.raises(CannotMerge):
        merge(card(2), text)


def test_deleted_section_comes_back_without_deleted_fields():
    text = "---\nlicense: mit\n---\n\nMine.\n"
    merged = merge(card(2), text, card(1))
    assert "Mine." in merged and "# Step 2" in merged and "tags" not in fields(merged)


def test_no_name_breaks_the_section():
    names = ["-->", "<!-- ursa-minor:end -->", "ursa-minor:begin", "}--", "\u2028"]
    for name in names:
        first = card(1, body=f"{name}\n", tags=[name])
        assert merge(card(2, body=f"{name}\n", tags=[name]), first) == card(
            2, body=f"{name}\n", tags=[name]
        )
