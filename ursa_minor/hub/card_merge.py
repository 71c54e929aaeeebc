"""Merge a generated model card into the card on the Hub, and keep what other people wrote in it.

Our text is a section between two markers, which are HTML comments. The first marker contains a
record of the push: a hash of the text, the metadata and the results. Text outside the section is
kept, and so are fields of the metadata that were edited on the Hub.
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
# Characters that must not occur in the record: an HTML comment ends at the first "-->", and nothing
# in it may look like a marker. JSON reads the escaped form as the same text.
ESCAPES = {
    "--": r"\u002d\u002d",
    "<": r"\u003c",
    ">": r"\u003e",
    "ursa-minor:": r"ursa-minor\u003a",
}
FIX = "Correct the card on the Hub. The next push will then update it"


@dataclass(frozen=True)
class PushRecord:
    """The contents of a card that a push wrote.

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
    """Our section of a card.

    Attributes:
        start: index of its first character in the body.
        end: index after its last character.
        record: the record of the push that wrote it.
    """

    start: int
    end: int
    record: PushRecord


def mark(card_text: str) -> str:
    """Return a generated card with markers around its body."""
    card = card_metadata.parse(card_text)
    return card.opening + card.header + card.closing + f"\n{_marked(card)}\n"


def _marked(card: ParsedCard) -> str:
    """Return the body of a generated card as a section with its markers."""
    body = card.body.strip()
    for marker in set(MARKERS.findall(body)):
        # A name that the user has chosen looks like a marker. With a space it does not.
        body = body.replace(marker, marker.replace(":", ": "))
    text = f"\n{NOTE}\n\n{body}\n\n"

    push_record = _push_record(card, text)
    record = json.dumps(vars(push_record))
    for character, escape in ESCAPES.items():
        record = record.replace(character, escape)
    return f"<!-- ursa-minor:begin {record} -->{text}{END}"


def _push_record(card: ParsedCard, text: str) -> PushRecord:
    fields = {name: value for name, value in card.metadata.items() if name != RESULTS}
    results = card_metadata.fingerprints(card.metadata.get(RESULTS))
    return PushRecord(_hash(text), fields, results)


def _hash(text: str) -> str:
    """Return a hash that ignores white space at the ends of lines, because editors change it."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def find_section(body: str) -> Section | None:
    """Return our section of a body, or None if there is none.

    Raises:
        CannotMerge: a marker is missing or occurs twice, or the section was edited.
    """
    if not MARKERS.search(body):
        return None
    begin = BEGIN.search(body)
    end = body.rfind(END)
    if len(MARKERS.findall(body)) != 2 or begin is None or end < begin.end():
        raise CannotMerge(
            "each marker of the section (ursa-minor:begin, ursa-minor:end) must occur exactly "
            "once. To get a new section, delete the remains of the old one with its markers"
        )
    try:
        record = PushRecord(**json.loads(begin["record"]))
        if not isinstance(record.metadata, dict) or not isinstance(record.results, list):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise CannotMerge(
            "the marker ursa-minor:begin was edited. To get a new section, delete the old one with "
            "its markers"
        ) from None
    if _hash(body[begin.end() : end]) != record.text:
        raise CannotMerge(
            "the section between the markers was edited, and a push would replace it. Move your "
            "text above or below the markers, and delete the section with its markers. The next "
            "push adds a new section"
        )
    return Section(begin.start(), end + len(END), record)


def merge(new_text: str, current_text: str, last_text: str | None = None) -> str:
    """Return the card on the Hub with the new section and metadata.

    Merging the same card again changes nothing.

    Args:
        new_text: the card of the model that is pushed.
        current_text: the card on the Hub.
        last_text: the card of the last push. It is used if the current one has no section.

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
    """Return the record in the card of the last push, or an empty one if it is not known."""
    if card_text is not None:
        with contextlib.suppress(CannotMerge):
            section = find_section(card_metadata.parse(card_text).body)
            if section is not None:
                return section.record
    return PushRecord("", {}, [])


def _append(body: str, section: str, newline: str) -> str:
    """Return a body with our section below its text."""
    if not body.endswith("\n"):
        body += newline
    return f"{body}{newline}{section}{newline}"


def add_results(current_text: str, index: Any) -> str:
    """Return the card on the Hub with new evaluation results.

    They replace older values of the same metrics.

    Args:
        current_text: the card on the Hub.
        index: a model-index.

    Raises:
        CannotMerge: the current card is damaged.
    """
    current = card_metadata.parse(current_text)
    results = current.metadata.get(RESULTS)
    merged = card_metadata.merged_results(results, index, last=())
    changes = {}
    if merged != results:
        changes[RESULTS] = merged
    return card_metadata.write(current, changes)
