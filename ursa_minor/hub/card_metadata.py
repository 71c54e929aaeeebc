"""Parse and change the metadata block of a model card, and merge evaluation results into it.

Fields that do not change keep their text, so comments and the notation of values survive.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

CARD_FILE = "README.md"
RESULTS = "model-index"
LISTS = ("datasets", "language", "tags")  # fields that are merged element by element
BLOCK = re.compile(
    r"\A(?P<opening>\ufeff?\s*---[ \t]*(?:\r\n|\n))"
    r"(?P<header>.*?)"
    r"(?P<closing>^---[ \t]*(?:\r\n|\n|\Z))",
    re.DOTALL | re.MULTILINE,
)
OPENING = re.compile(r"\A\ufeff?\s*---[ \t]*(?:\r|\n|\Z)")
REMOVED: Any = object()  # the new value of a field that is to be removed


class CannotMerge(ValueError):
    """A model card on the Hub cannot be changed without the risk of losing other people's edits."""


@dataclass(frozen=True)
class ParsedCard:
    """A README.md, divided into its metadata block and its Markdown text.

    Attributes:
        opening: the line "---" above the metadata, with any white space before it.
        header: the metadata block as YAML text.
        closing: the line "---" below the metadata.
        body: the Markdown text.
        metadata: the values of the metadata block.
    """

    opening: str
    header: str
    closing: str
    body: str
    metadata: dict[str, Any]

    @property
    def newline(self) -> str:
        """The line ending of most lines."""
        text = self.opening + self.header + self.body
        num_windows_lines = text.count("\r\n")
        num_lines = text.count("\n")
        if num_windows_lines > num_lines / 2:
            return "\r\n"
        return "\n"


class ResultMetric(NamedTuple):
    """The metric of a result in a model-index. Results with equal ones replace each other."""

    task: Any
    dataset: Any
    config: Any
    split: Any
    revision: Any
    type: Any
    name: Any


def parse(text: str) -> ParsedCard:
    """Split a README.md into its metadata block and its Markdown text.

    Raises:
        CannotMerge: the metadata block is damaged.
    """
    block = BLOCK.match(text)
    if block is None:
        if OPENING.match(text):
            raise CannotMerge("its metadata block has no closing line ---")
        byte_order_mark = "\ufeff" if text.startswith("\ufeff") else ""
        return ParsedCard(
            opening=byte_order_mark,
            header="",
            closing="",
            body=text.removeprefix(byte_order_mark),
            metadata={},
        )
    return ParsedCard(
        opening=block["opening"],
        header=block["header"],
        closing=block["closing"],
        body=text[block.end() :],
        metadata=_read(block["header"]),
    )


def _read(header: str) -> dict[str, Any]:
    """Return the values of a metadata block. Raises CannotMerge if it is damaged."""
    try:
        values = yaml.safe_load(header)
        root = yaml.compose(header, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        problem = getattr(error, "problem", None) or type(error).__name__
        raise CannotMerge(f"its metadata block is not valid YAML ({problem})") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise CannotMerge("its metadata block does not consist of lines in the form `field: value`")
    if root is not None and len(root.value) != len(values):
        raise CannotMerge("its metadata block contains the same field twice")
    return values


def write(card: ParsedCard, changes: Mapping[str, Any], body: str | None = None) -> str:
    """Return the README.md with some fields changed.

    Args:
        card: the current README.md.
        changes: the new value of each field, or ``REMOVED``.
        body: the new Markdown text. By default it stays the same.

    Raises:
        CannotMerge: the fields cannot be changed without changing others.
    """
    if body is None:
        body = card.body
    if not changes:
        return card.opening + card.header + card.closing + body

    fields = {**card.metadata, **changes}
    expected = {name: value for name, value in fields.items() if value is not REMOVED}
    header = _replace_lines(card, changes)
    if not _contains(header, expected):
        # The fields share a line, for example {license: mit, tags: [a]}. Write a new block.
        header = _dump(expected, card.newline)
        if not _contains(header, expected):
            raise CannotMerge(
                "its metadata block cannot be changed without losing the values of other fields"
            )
    opening = card.opening
    closing = card.closing
    if not closing:  # the card had no metadata block
        opening += f"---{card.newline}"
        closing = f"---{card.newline}{card.newline}"
    return opening + header + closing + body


def _contains(header: str, expected: Mapping[str, Any]) -> bool:
    """Return whether a metadata block has exactly these values."""
    try:
        return repr(_read(header)) == repr(expected)  # repr, because nan differs from itself
    except CannotMerge:
        return False


def _replace_lines(card: ParsedCard, changes: Mapping[str, Any]) -> str:
    """Return the metadata block with the lines of changed fields replaced and new fields added."""
    header = card.header
    root = yaml.compose(header, Loader=yaml.SafeLoader)
    fields = root.value if root else []
    if not fields:
        for name, value in changes.items():
            header += _dump_field(name, value, card.newline)
        return header

    # The text of a field ends where the next field starts.
    starts = [key.start_mark.index for key, _ in fields]
    ends = [*starts[1:], len(header)]
    parts = [header[: starts[0]]]
    for (key, _), start, end in zip(fields, starts, ends, strict=True):
        lines = header[start:end].splitlines(keepends=True)
        name = key.value
        if name in changes:
            num_lines = len(lines)
            while num_lines > 1 and re.match(r"\s*$|#", lines[num_lines - 1]):
                num_lines -= 1  # comments and empty lines above the next field stay
            lines[:num_lines] = [_dump_field(name, changes[name], card.newline)]
        parts += lines

    new_names = [name for name in changes if name not in card.metadata]
    ends_within_line = bool(parts[-1]) and not parts[-1].endswith("\n")
    if new_names and ends_within_line:
        parts.append(card.newline)
    for name in new_names:
        parts.append(_dump_field(name, changes[name], card.newline))
    return "".join(parts)


def _dump_field(name: str, value: Any, newline: str) -> str:
    """Return a field as YAML, or an empty text if it is removed."""
    if value is REMOVED:
        return ""
    return _dump({name: value}, newline)


def _dump(values: Mapping[str, Any], newline: str) -> str:
    if not values:
        return ""
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    return text.replace("\n", newline)


def merged_fields(
    current: Mapping[str, Any], new: Mapping[str, Any], last: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the changes that update the recipe's fields of a card and keep edits made on the Hub.

    A field was edited if its value on the Hub differs from the one that the last push wrote. It
    stays. Lists are merged element by element.

    Args:
        current: the metadata on the Hub.
        new: the metadata of the model that is pushed.
        last: the metadata that the last push wrote, or empty if this is the first push.
    """
    old_names = [name for name in last if name not in new]
    changes = {}
    for name in [*new, *old_names]:
        if name == RESULTS:
            continue
        current_list = _as_list(current.get(name))
        new_list = _as_list(new.get(name))
        last_list = _as_list(last.get(name))
        if name in LISTS and _are_texts([*current_list, *new_list, *last_list]):
            merged = _merged_list(current_list, new_list, last_list)
            if merged != current_list:
                changes[name] = merged or REMOVED
        elif current_list == last_list:  # the field was not edited
            if name not in new:
                changes[name] = REMOVED
            elif new_list != current_list:
                changes[name] = new[name]

    effective = {}
    for name, value in changes.items():
        if value is REMOVED and name not in current:
            continue
        effective[name] = value
    return effective


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _merged_list(current: Sequence[str], new: Sequence[str], last: Sequence[str]) -> list[str]:
    """Return a list on the Hub with the values that the recipe has added or removed since."""
    values = [value for value in current if value in new or value not in last]
    known = {*current, *last}
    values += [value for value in new if value not in known]
    return values


def merged_results(current: Any, new: Any, last: Collection[str]) -> Any:
    """Return the model-index of a card with new results. Results of other people are kept.

    Args:
        current: the model-index on the Hub, or None.
        new: the model-index of the model that is pushed, or None.
        last: ``fingerprints`` of the results that the last push wrote. They describe older weights,
            so those that are still unchanged on the Hub and are not among the new results are
            removed.
    """
    entries = deepcopy(_checked(current))
    new_results = {}
    for group, result in _results(_checked(new)):
        new_results[metric_of(group, result)] = (group, result)

    replaced: set[ResultMetric] = set()
    for entry in entries:
        for group in entry["results"]:
            group["metrics"] = _merged_group(group, new_results, last, replaced)
        entry["results"] = [group for group in entry["results"] if group["metrics"]]

    for metric, (group, result) in new_results.items():
        if metric in replaced:
            continue
        if not entries:
            entries.append({"name": new[0].get("name"), "results": []})
        _add(entries[0]["results"], group, result)
    return [entry for entry in entries if entry["results"]]


def _merged_group(
    group: Mapping,
    new_results: Mapping[ResultMetric, tuple[dict, dict]],
    last: Collection[str],
    replaced: set[ResultMetric],
) -> list[dict]:
    """Return the results of a group of a model-index after a push.

    Args:
        group: results on the Hub with the same task and data set.
        new_results: the group and the value of each new result.
        last: ``fingerprints`` of the results that the last push wrote.
        replaced: metrics whose new value is in the card. This function adds those that it replaces.
            A metric that occurs twice on the Hub keeps its first place only.
    """
    merged = []
    for result in group["metrics"]:
        metric = metric_of(group, result)
        is_ours = "source" not in group and not result.get("verified")
        if is_ours and metric in new_results:
            if metric not in replaced:
                _, new_result = new_results[metric]
                merged.append(new_result)
            replaced.add(metric)
        elif not is_ours or fingerprint(group, result) not in last:
            merged.append(result)
    return merged


def _add(groups: list[dict], group: Mapping, result: Mapping) -> None:
    """Add a result to the group of its task and data set. Create the group if it is missing."""
    metric = metric_of(group, {})
    for other in groups:
        if "source" not in other and metric_of(other, {}) == metric:
            other["metrics"].append(dict(result))
            return
    groups.append({**group, "metrics": [dict(result)]})


def _checked(index: Any) -> list[dict]:
    """Return a model-index, or [] for None. Raises CannotMerge if the Hub would not accept it."""
    if index is None:
        return []
    try:
        for group, result in _results(index):
            hash(metric_of(group, result))
    except (TypeError, KeyError, AttributeError):
        raise CannotMerge(
            f"the field {RESULTS} of its metadata does not have the format that the Hub requires"
        ) from None
    return index


def _results(index: Any) -> list[tuple[dict, dict]]:
    """Return the results of a model-index, each with its group."""
    results = []
    for entry in index:
        for group in entry["results"]:
            for result in group["metrics"]:
                results.append((group, result))
    return results


def metric_of(group: Mapping, result: Mapping) -> ResultMetric:
    """Return the metric of a result in a model-index."""
    dataset = group["dataset"]
    return ResultMetric(
        task=group["task"]["type"],
        dataset=dataset["type"],
        config=dataset.get("config"),
        split=dataset.get("split"),
        revision=dataset.get("revision"),
        type=result.get("type"),
        name=result.get("name"),
    )


def fingerprints(index: Any) -> list[str]:
    """Return a short hash of each result of a model-index."""
    return [fingerprint(group, result) for group, result in _results(_checked(index))]


def fingerprint(group: Mapping, result: Mapping) -> str:
    """Return a short hash of the metric and the value of a result."""
    text = json.dumps([*metric_of(group, result), result.get("value")], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
