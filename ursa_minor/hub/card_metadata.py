"""The metadata block of a model card: read it, change single fields, merge evaluation results.

Fields that do not change keep their text, so that comments and the way a value is written survive.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

RESULTS = "model-index"
LISTS = ("datasets", "language", "tags")  # fields that are merged element by element
BLOCK = re.compile(
    r"\A(?P<opening>\ufeff?\s*---[ \t]*(?:\r\n|\n))"
    r"(?P<header>.*?)"
    r"(?P<closing>^---[ \t]*(?:\r\n|\n|\Z))",
    re.DOTALL | re.MULTILINE,
)
OPENING = re.compile(r"\A\ufeff?\s*---[ \t]*(?:\r|\n|\Z)")
REMOVED: Any = object()  # the new value of a field that goes


class CannotMerge(ValueError):
    """A model card on the Hub cannot be changed without a risk to what others wrote in it."""


@dataclass(frozen=True)
class ParsedCard:
    """A README.md: its metadata block, as text and as values, and the Markdown below it."""

    opening: str
    header: str
    closing: str
    body: str
    metadata: dict[str, Any]

    @property
    def newline(self) -> str:
        """The line ending of most lines."""
        text = self.opening + self.header + self.body
        return "\r\n" if 2 * text.count("\r\n") > text.count("\n") else "\n"


class ResultMetric(NamedTuple):
    """What one entry of a model-index measures. Entries with equal ones are values of the same metric."""

    task: Any
    dataset: Any
    config: Any
    split: Any
    revision: Any
    type: Any
    name: Any


def parse(text: str) -> ParsedCard:
    """Split a README.md.

    Raises:
        CannotMerge: the metadata block is damaged.
    """
    block = BLOCK.match(text)
    if block is None:
        if OPENING.match(text):
            raise CannotMerge("its metadata block has no closing ---")
        mark = "\ufeff" if text.startswith("\ufeff") else ""
        return ParsedCard(
            opening=mark, header="", closing="", body=text.removeprefix(mark), metadata={}
        )
    return ParsedCard(
        opening=block["opening"],
        header=block["header"],
        closing=block["closing"],
        body=text[block.end() :],
        metadata=_read(block["header"]),
    )


def _read(header: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(header)
        root = yaml.compose(header, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        problem = getattr(error, "problem", None) or type(error).__name__
        raise CannotMerge(f"its metadata block is not valid YAML ({problem})") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise CannotMerge("its metadata block is not a mapping of `field: value` lines")
    if root is not None and len(root.value) != len(values):
        raise CannotMerge("its metadata block has a field twice")
    return values


def write(card: ParsedCard, changes: Mapping[str, Any], body: str | None = None) -> str:
    """Return the README.md with other values of some fields, and with another body if one is given.

    Raises:
        CannotMerge: the block is written in a form that cannot be changed field by field.
    """
    body = card.body if body is None else body
    if not changes:
        return card.opening + card.header + card.closing + body
    expected = {**card.metadata, **changes}
    expected = {name: value for name, value in expected.items() if value is not REMOVED}
    header = _with_changes(card, changes)
    if not _holds(header, expected):
        header = _dump(expected, card.newline)
        if not _holds(header, expected):
            raise CannotMerge(
                "its metadata block cannot be rewritten without a change of other fields"
            )
    opening, closing = card.opening, card.closing
    if not closing:
        opening += f"---{card.newline}"
        closing = f"---{card.newline}{card.newline}"
    return opening + header + closing + body


def _holds(header: str, expected: Mapping[str, Any]) -> bool:
    try:
        return repr(_read(header)) == repr(expected)  # repr, because nan differs from itself
    except CannotMerge:
        return False


def _with_changes(card: ParsedCard, changes: Mapping[str, Any]) -> str:
    """Replace the lines of changed fields; append new ones."""
    header = card.header
    root = yaml.compose(header, Loader=yaml.SafeLoader)
    starts = [(key.value, key.start_mark.index) for key, _ in root.value] if root else []
    if not starts:
        return header + "".join(
            _dump_field(name, value, card.newline) for name, value in changes.items()
        )
    ends = [start for _, start in starts[1:]] + [len(header)]
    parts = [header[: starts[0][1]]]
    for (name, start), end in zip(starts, ends, strict=True):
        lines = header[start:end].splitlines(keepends=True)
        if name in changes:
            num_lines = len(lines)
            while num_lines > 1 and re.match(r"\s*$|#", lines[num_lines - 1]):
                num_lines -= 1  # comments and empty lines above the next field stay
            lines[:num_lines] = [_dump_field(name, changes[name], card.newline)]
        parts += lines
    new = [name for name in changes if name not in card.metadata]
    if new and parts[-1] and not parts[-1].endswith("\n"):
        parts.append(card.newline)
    parts += [_dump_field(name, changes[name], card.newline) for name in new]
    return "".join(parts)


def _dump_field(name: str, value: Any, newline: str) -> str:
    return "" if value is REMOVED else _dump({name: value}, newline)


def _dump(values: Mapping[str, Any], newline: str) -> str:
    if not values:
        return ""
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    return text.replace("\n", newline)


def merged_fields(
    current: Mapping[str, Any], new: Mapping[str, Any], last: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the changes that bring the recipe's fields to a card, and keep what was edited on the Hub.

    A field whose value on the Hub differs from what the last push wrote was edited there, and stays.
    Lists are merged element by element.

    Args:
        current: the metadata on the Hub.
        new: the metadata of the model that is pushed.
        last: the metadata that the last push wrote; empty if there was none.
    """
    changes = {}
    for name in [*new, *(name for name in last if name not in new)]:
        if name == RESULTS:
            continue
        lists = [_as_list(values.get(name)) for values in (current, new, last)]
        if name in LISTS and all(_is_simple(values) for values in lists):
            merged = _merged_list(*lists)
            if merged != lists[0]:
                changes[name] = merged or REMOVED
        elif _as_list(current.get(name)) == _as_list(last.get(name)):  # not edited
            if name not in new:
                changes[name] = REMOVED
            elif _as_list(new[name]) != _as_list(current.get(name)):
                changes[name] = new[name]
    return {
        name: value for name, value in changes.items() if value is not REMOVED or name in current
    }


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _is_simple(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _merged_list(current: Sequence[str], new: Sequence[str], last: Sequence[str]) -> list[str]:
    values = [value for value in current if value in new or value not in last]
    known = {*current, *last}
    return values + [value for value in new if value not in known]


def merged_results(current: Any, new: Any, last: Collection[str]) -> Any:
    """Return the model-index of a card with new results; other people's results stay.

    Args:
        current: the model-index on the Hub; None if there is none.
        new: the model-index of the model that is pushed.
        last: ``fingerprints`` of the results that the last push wrote. Those that are still the
            same and are not among the new ones are removed, because they describe older weights.
    """
    entries = deepcopy(_checked(current))
    waiting = {metric_of(group, value): (group, value) for group, value in _values(_checked(new))}
    placed = set()
    for entry in entries:
        for group in entry["results"]:
            values = []
            for value in group["metrics"]:
                metric = metric_of(group, value)
                is_ours = "source" not in group and not value.get("verified")
                if is_ours and metric in waiting:
                    if metric not in placed:
                        values.append(waiting[metric][1])
                    placed.add(metric)
                elif not is_ours or fingerprint(group, value) not in last:
                    values.append(value)
            group["metrics"] = values
        entry["results"] = [group for group in entry["results"] if group["metrics"]]
    for metric, (group, value) in waiting.items():
        if metric not in placed:
            if not entries:
                entries.append({"name": _checked(new)[0].get("name"), "results": []})
            _add(entries[0]["results"], group, value)
    return [entry for entry in entries if entry["results"]]


def _add(groups: list[dict], group: Mapping, value: Mapping) -> None:
    """Add a value to the group of its task and data set, or in a new group."""
    metric = metric_of(group, {})
    for other in groups:
        if "source" not in other and metric_of(other, {}) == metric:
            other["metrics"].append(dict(value))
            return
    groups.append({**group, "metrics": [dict(value)]})


def _checked(index: Any) -> list[dict]:
    """Return a model-index, or [] for None. Raises CannotMerge if it is not in the Hub's form."""
    if index is None:
        return []
    try:
        for group, value in _values(index):
            metric_of(group, value)
            hash(metric_of(group, value))
    except (TypeError, KeyError, AttributeError):
        raise CannotMerge("its model-index is not in the form that the Hub documents") from None
    return index


def _values(index: Any) -> list[tuple[dict, dict]]:
    groups = [group for entry in index for group in entry["results"]]
    return [(group, value) for group in groups for value in group["metrics"]]


def metric_of(group: Mapping, value: Mapping) -> ResultMetric:
    """Return what an entry of a model-index measures."""
    data = group["dataset"]
    return ResultMetric(
        task=group["task"]["type"],
        dataset=data["type"],
        config=data.get("config"),
        split=data.get("split"),
        revision=data.get("revision"),
        type=value.get("type"),
        name=value.get("name"),
    )


def fingerprints(index: Any) -> list[str]:
    """Return a short hash of each result of a model-index."""
    return [fingerprint(group, value) for group, value in _values(_checked(index))]


def fingerprint(group: Mapping, value: Mapping) -> str:
    """Return a short hash of what a result measures and of its value."""
    text = json.dumps([*metric_of(group, value), value.get("value")], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
