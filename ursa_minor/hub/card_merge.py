"""Merge a new model card into the one on the Hub, and keep what others wrote there.

Our text is a section between two markers, which are HTML comments. The first one records what was
written: the text's hash, the metadata and the results. Text outside of the section, and fields of the
metadata that were edited on the Hub, stay.
"""

import contextlib
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from ursa_minor.hub import card_metadata
from ursa_minor.hub.card_metadata import REMOVED, RESULTS, CannotMerge, ParsedCard

BEGIN = re.compile(r"<!-- ursa-minor:begin (?P<record>\{.*?\}) -->")
END = "<!-- ursa-minor:end -->"
MARKERS = re.compile(r"ursa-minor:(?:begin|end)")
NOTE = "<!-- Each push replaces this section. Write above or below it, outside of the markers. -->"
ESCAPES = {
    "--": r"\u002d\u002d",
    "<": r"\u003c",
    ">": r"\u003e",
    "ursa-minor:": r"ursa-minor\u003a",
}
FIX = "Correct that on the Hub, and the next push updates it"


@dataclass(frozen=True)
class PushRecord:
    """What a push wrote.

    Attributes:
        text: a hash of the section's text.
        metadata: the fields, without the results.
        results: fingerprints of the results.
    """

    text: str
    metadata: dict[str, Any]
    results: list[str]


@dataclass(frozen=True)
class Section:
    """A section in a body: where it begins and ends, and what the push wrote."""

    start: int
    end: int
    record: PushRecord


def mark(card_text: str) -> str:
    """Return a generated card with markers around its body."""
    card = card_metadata.parse(card_text)
    return card.opening + card.header + card.closing + f"\n{_marked(card)}\n"


def _marked(card: ParsedCard) -> str:
    """Return the body of a generated card as a section with its markers."""
    body = MARKERS.sub(lambda match: match[0].replace(":", ": "), card.body.strip())  # a name's
    text = f"\n{NOTE}\n\n{body}\n\n"
    record = _push_record(card, text)
    fields = json.dumps(vars(record))
    # An HTML comment ends at the first "-->", and no name may look like a marker.
    for text_of_name, escaped in ESCAPES.items():
        fields = fields.replace(text_of_name, escaped)
    return f"<!-- ursa-minor:begin {fields} -->{text}{END}"


def _push_record(card: ParsedCard, text: str) -> PushRecord:
    fields = {name: value for name, value in card.metadata.items() if name != RESULTS}
    return PushRecord(_hash(text), fields, card_metadata.fingerprints(card.metadata.get(RESULTS)))


def _hash(text: str) -> str:
    """Return a hash that white space at the ends of lines, which editors change, does not change."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def find_section(body: str) -> Section | None:
    """Return our section of a body; None if there is none.

    Raises:
        CannotMerge: a marker is missing or occurs twice, or the section was edited.
    """
    if not MARKERS.search(body):
        return None
    begin = BEGIN.search(body)
    end = body.rfind(END)
    if len(MARKERS.findall(body)) != 2 or begin is None or end < begin.end():
        raise CannotMerge(
            "the markers of our section (ursa-minor:begin, ursa-minor:end) must occur once each. "
            "To get a new section, delete what remains of the old one with its markers"
        )
    try:
        record = PushRecord(**json.loads(begin["record"]))
        if not isinstance(record.metadata, dict) or not isinstance(record.results, list):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise CannotMerge("the first marker of our section was edited") from None
    if _hash(body[begin.end() : end]) != record.text:
        raise CannotMerge(
            "our section was edited, and the push would replace it. Move your text above or below the "
            "markers, and delete the section with its markers; the next push adds a new one"
        )
    return Section(begin.start(), end + len(END), record)


def merge(new_text: str, current_text: str, last_text: str | None = None) -> str:
    """Return the card on the Hub with the new section and metadata. Merging twice changes nothing more.

    Args:
        new_text: the card of the model that is pushed.
        current_text: the card on the Hub.
        last_text: the card of the last push. It is used where the current one has no section.

    Raises:
        CannotMerge: the current card is damaged, or our section in it was edited.
    """
    if not current_text.strip("\ufeff \t\r\n"):
        return new_text
    new = card_metadata.parse(new_text)
    current = card_metadata.parse(current_text)
    new_section = find_section(new.body)
    assert new_section is not None
    text = new.body[new_section.start : new_section.end].replace("\n", current.newline)

    section = find_section(current.body)
    if section is not None:
        body = current.body[: section.start] + text + current.body[section.end :]
        last = section.record
    else:
        body = _append(current.body, text, current.newline)
        last = _last_record(last_text)

    changes = card_metadata.merged_fields(current.metadata, new.metadata, last.metadata)
    results = current.metadata.get(RESULTS)
    merged = card_metadata.merged_results(results, new.metadata.get(RESULTS), last.results)
    if merged != (results or []):
        changes[RESULTS] = merged or REMOVED
    return card_metadata.write(current, changes, body)


def _last_record(card_text: str | None) -> PushRecord:
    """Return what the last push wrote, from its card; an empty record if that is not known."""
    if card_text is not None:
        with contextlib.suppress(CannotMerge):
            section = find_section(card_metadata.parse(card_text).body)
            if section is not None:
                return section.record
    return PushRecord("", {}, [])


def _append(body: str, section: str, newline: str) -> str:
    """Return a body with our section below its text."""
    between = ""
    if not body.endswith("\n"):
        between += newline
    return f"{body}{between}{newline}{section}{newline}"


def add_results(current_text: str, index: Any) -> str:
    """Return the card on the Hub with new evaluation results, which replace older values of the same metrics.

    Args:
        index: a model-index.

    Raises:
        CannotMerge: the current card is damaged.
    """
    current = card_metadata.parse(current_text)
    merged = card_metadata.merged_results(current.metadata.get(RESULTS), index, last=())
    changes = {} if merged == current.metadata.get(RESULTS) else {RESULTS: merged}
    return card_metadata.write(current, changes)
