"""Conditions under which a recipe key has an effect.

A key that always has an effect has no condition. ``keys.py`` attaches conditions to keys,
``data_source.py`` and ``rules.py`` evaluate them, and ``scripts/keys_table.py`` prints them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ursa_minor.recipe.source_kind import SourceKind, source_kind

Values = Mapping[str, Any]


class Condition(Protocol):
    """A condition on the values of a recipe."""

    def holds(self, values: Values) -> bool:
        """Return whether the condition is met."""
        ...

    def describe(self) -> str:
        """Return the condition as the documentation states it."""
        ...

    def violation(self, values: Values) -> str:
        """Return the setting that violates the condition, for example ``optimizer = adamw``."""
        ...

    def fix(self) -> str:
        """Return the flag that meets the condition, or an empty string if none is suggested."""
        ...


@dataclass(frozen=True)
class KeyIs:
    """The key has one of these values. ``None`` means an empty value.

    Next to other values, ``None`` means that the value is not known yet, such as the architecture
    of ``init_from`` before its model is loaded.
    """

    key: str
    allowed: tuple

    def holds(self, values: Values) -> bool:
        """Return whether the key has one of the values."""
        return (values[self.key] or None) in self.allowed

    def describe(self) -> str:
        """Return, for example, ``optimizer = muon``."""
        return f"`{self.key}` = {self._alternatives()}"

    def violation(self, values: Values) -> str:
        """Return, for example, ``optimizer = adamw``."""
        return _assignment(self.key, values[self.key])

    def fix(self) -> str:
        """Return, for example, ``--optimizer muon``."""
        return f"--{self.key} {self._alternatives()}"

    def _alternatives(self) -> str:
        known = [value for value in self.allowed if value is not None]
        return _join_or([_value_text(value) for value in known or self.allowed])


@dataclass(frozen=True)
class KeyIsSet:
    """The key is not empty, 0 or false.

    Attributes:
        key: the key.
        example: the value that the fix suggests.
    """

    key: str
    example: str

    def holds(self, values: Values) -> bool:
        """Return whether the key is set."""
        return bool(values[self.key])

    def describe(self) -> str:
        """Return, for example, ``eval_steps > 0``."""
        if self.example.isdecimal():
            return f"`{self.key}` > 0"
        if self.example == "true":
            return f"`{self.key}` = true"
        return f"`{self.key}` is set"

    def violation(self, values: Values) -> str:
        """Return, for example, ``eval_steps = 0``."""
        return _assignment(self.key, values[self.key])

    def fix(self) -> str:
        """Return, for example, ``--eval_steps 250``."""
        return f"--{self.key} {self.example}"


@dataclass(frozen=True)
class ListIncludes:
    """The key, a list, includes one of these items.

    Attributes:
        key: the key.
        items: the items, of which the fix suggests the last one.
        description: a name for the items, for the documentation.
    """

    key: str
    items: tuple[str, ...]
    description: str

    def holds(self, values: Values) -> bool:
        """Return whether the list includes one of the items."""
        return any(item in self.items for item in values[self.key] or ())

    def describe(self) -> str:
        """Return, for example, ``report_to includes wandb``."""
        return f"`{self.key}` includes {self.description}"

    def violation(self, values: Values) -> str:
        """Return, for example, ``report_to = none``."""
        return _assignment(self.key, values[self.key])

    def fix(self) -> str:
        """Return, for example, ``--report_to wandb``."""
        return f"--{self.key} {self.items[-1]}"


@dataclass(frozen=True)
class ModeIs:
    """A mode of the command line is on, such as ``--eval_only``."""

    mode: str

    def holds(self, values: Values) -> bool:
        """Return whether the mode is on."""
        return bool(values.get(self.mode))

    def describe(self) -> str:
        """Return the mode's flag."""
        return f"`--{self.mode}`"

    def violation(self, values: Values) -> str:
        """Return an empty string, because an absent mode is not worth mentioning."""
        return ""

    def fix(self) -> str:
        """Return an empty string, because a mode changes the purpose of a command."""
        return ""


@dataclass(frozen=True)
class SourceIs:
    """The data source is of one of these kinds. The condition also holds without a data source."""

    kinds: tuple[SourceKind, ...]

    def holds(self, values: Values) -> bool:
        """Return whether the data source is of one of the kinds."""
        kind = source_kind(values)
        return kind is None or kind in self.kinds

    def describe(self) -> str:
        """Return, for example, ``the source is text files or tables``."""
        return f"the source is {_join_or([kind.value for kind in self.kinds])}"

    def violation(self, values: Values) -> str:
        """Return, for example, ``tables as the data source``."""
        kind = source_kind(values)
        return f"{kind.value} as the data source" if kind else "no data source"

    def fix(self) -> str:
        """Return an empty string, because another data source would be another run."""
        return ""


@dataclass(frozen=True)
class AnyOf:
    """At least one of the conditions is met."""

    conditions: tuple[Condition, ...]

    def holds(self, values: Values) -> bool:
        """Return whether one of the conditions is met."""
        return any(condition.holds(values) for condition in self.conditions)

    def describe(self) -> str:
        """Return the conditions, joined by "or"."""
        return _join_or([condition.describe() for condition in self.conditions])

    def violation(self, values: Values) -> str:
        """Return the settings that violate the conditions, joined by "and"."""
        violations = [condition.violation(values) for condition in self.conditions]
        return " and ".join(text for text in violations if text)

    def fix(self) -> str:
        """Return the flags of which each meets one of the conditions, joined by "or"."""
        fixes = [condition.fix() for condition in self.conditions]
        return _join_or([text for text in fixes if text])


def _assignment(key: str, value: Any) -> str:
    return f"{key} = {_value_text(value)}"


def _value_text(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value in ("", [], ()):
        return "none"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return str(value)


def _join_or(texts: Sequence[str]) -> str:
    """Return "a", "a or b" or "a, b or c", and an empty string for no texts."""
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} or {texts[-1]}"
