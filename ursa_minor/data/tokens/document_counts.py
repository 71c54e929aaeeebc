"""Statistics of the documents of a split, which the manifest stores.

The keys are ``DOCUMENTS``, ``WITHOUT_TEXT``, one for each kind of contents of rows without text
(``without_text: numbers``), and those of the encoder.
"""

from collections.abc import Iterable, Mapping

Counts = dict[str, int]
DOCUMENTS = "documents"
WITHOUT_TEXT = "without_text"
CONTENTS_PREFIX = f"{WITHOUT_TEXT}: "
OTHER_CONTENTS = f"{CONTENTS_PREFIX}other values"
MAX_CONTENTS = 10  # number of kinds of contents; more of them are counted as other values
# A larger share of rows without text is reported at every start.
MAX_SHARE_WITHOUT_TEXT = 0.01


def row_without_text(contents: str) -> Counts:
    """Return the statistics of a row that contains something else than text."""
    return {WITHOUT_TEXT: 1, f"{CONTENTS_PREFIX}{contents}": 1}


def is_contents(name: str) -> bool:
    """Return whether a key counts a kind of contents of rows without text."""
    return name.startswith(CONTENTS_PREFIX)


def add(tally: Counts, counts: Mapping[str, int]) -> None:
    """Add the statistics of a document. Counter.update is slower by microseconds."""
    for name, number in counts.items():
        if name not in tally and is_contents(name):
            kinds = [other for other in tally if is_contents(other)]
            if len(kinds) >= MAX_CONTENTS:
                name = OTHER_CONTENTS
        tally[name] = tally.get(name, 0) + number


def describe_contents(counts: Mapping[str, int]) -> str:
    """Return what the rows without text contain, most frequent first, with the number of rows."""
    names = [name for name in counts if is_contents(name)]
    names.sort(key=lambda name: counts[name], reverse=True)
    descriptions = []
    for name in names:
        contents = name.removeprefix(CONTENTS_PREFIX)
        descriptions.append(f"{contents} ({counts[name]:,})")
    return "; ".join(descriptions)


def describe_missing_text(counts_of_splits: Iterable[Mapping[str, int]]) -> str | None:
    """Return the share of the rows without text and what they contain, or None if it is small.

    Args:
        counts_of_splits: the statistics of each split of a source.
    """
    total: Counts = {}
    for counts in counts_of_splits:
        add(total, counts)
    num_missing = total.get(WITHOUT_TEXT, 0)
    num_rows = num_missing + total.get(DOCUMENTS, 0)
    if num_missing <= MAX_SHARE_WITHOUT_TEXT * num_rows:
        return None
    message = (
        f"{num_missing / num_rows:.1%} of the rows ({num_missing:,} of {num_rows:,}) have no text "
        f"and are skipped"
    )
    contents = describe_contents(total)
    if contents:
        message += f". They contain: {contents}"
    return f"{message}. If this is not intended, check the column (text_column or token_column)"
