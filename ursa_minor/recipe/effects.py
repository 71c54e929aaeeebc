"""Conditions under which a recipe key has an effect.

A key that always has an effect has no condition. ``keys.py`` attaches conditions to keys, ``data_source.py`` and
``rules.py`` evaluate them, and ``scripts/keys_table.py`` prints them.
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
        """Return the values that violate the condition, as in ``optimizer = adamw``."""
        ...

    def fix(self) -> str:
        """Return the flag that meets the condition, or an empty string if there is none to suggest."""
        ...


@dataclass(frozen=True)
class KeyIs:
    """The key has one of these values. ``None`` stands for an empty value.

    Next to other values, ``None`` means that the value is not known yet (the architecture of ``init_from``).
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
        return _alternatives([_shown(value) for value in known or self.allowed])


@dataclass(frozen=True)
class KeyIsSet:
    """The key is neither empty, nor 0, nor false. ``example`` is a value that the fix suggests."""

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
    """The key, a list, includes one of these values."""

    key: str
    wanted: tuple[str, ...]
    meaning: str

    def holds(self, values: Values) -> bool:
        """Return whether the list includes one of the values."""
        return not set(self.wanted).isdisjoint(values[self.key] or ())

    def describe(self) -> str:
        """Return, for example, ``report_to includes wandb``."""
        return f"`{self.key}` includes {self.meaning}"

    def violation(self, values: Values) -> str:
        """Return, for example, ``report_to = none``."""
        return _assignment(self.key, values[self.key])

    def fix(self) -> str:
        """Return, for example, ``--report_to wandb``."""
        return f"--{self.key} {self.wanted[-1]}"


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
        """Return nothing: an absent mode needs no mention."""
        return ""

    def fix(self) -> str:
        """Return nothing: a mode changes what a command does."""
        return ""


@dataclass(frozen=True)
class SourceIs:
    """The data source is of one of these kinds. Without any data source the condition holds."""

    kinds: tuple[SourceKind, ...]

    def holds(self, values: Values) -> bool:
        """Return whether the source that ``values`` state is of one of the kinds."""
        kind = source_kind(values)
        return kind is None or kind in self.kinds

    def describe(self) -> str:
        """Return the kinds of source."""
        return f"the source is {_alternatives([kind.value for kind in self.kinds])}"

    def violation(self, values: Values) -> str:
        """Return the kind of the source that ``values`` state."""
        kind = source_kind(values)
        return f"{kind.value} as the data source" if kind else "no data source"

    def fix(self) -> str:
        """Return nothing: suggesting another data source would not help."""
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
        return _alternatives([condition.describe() for condition in self.conditions])

    def violation(self, values: Values) -> str:
        """Return the values that violate the conditions."""
        violations = [condition.violation(values) for condition in self.conditions]
        return " and ".join(text for text in violations if text)

    def fix(self) -> str:
        """Return the flags that meet one of the conditions."""
        fixes = [condition.fix() for condition in self.conditions]
        return _alternatives([text for text in fixes if text])


def _assignment(key: str, value: Any) -> str:
    return f"{key} = {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value in ("", [], ()):
        return "none"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return str(value)


def _alternatives(texts: Sequence[str]) -> str:
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} or {texts[-1]}"
