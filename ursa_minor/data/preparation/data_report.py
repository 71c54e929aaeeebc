"""Describe the data of a source, for ``prepare_data.py --dry_run`` and ``check_setup.py``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ursa_minor.base.wording import pluralize
from ursa_minor.data.tokens import document_counts
from ursa_minor.data.tokens.document_counts import DOCUMENTS, WITHOUT_TEXT, Counts

TEXT_FILES = "text"  # the kind of text files


class Finding(NamedTuple):
    """A sentence on the data.

    Attributes:
        text: the sentence, without a period at its end.
        fix: what to do, without a capital letter. Empty if this is not a problem.
    """

    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.text}. Fix: {self.fix}" if self.fix else self.text


@dataclass(frozen=True)
class Cost:
    """An estimate of the time and the size of a preparation.

    Attributes:
        text_megabytes: size of the text.
        tokens: number of tokens.
        bytes_per_id: size of a token in a shard.
        seconds: time to prepare all of the text.
        measured_seconds: for how long text was encoded to estimate it.
        megabytes_per_second: size of the text that was encoded in a second.
        tokens_per_second: number of tokens that were encoded in a second.
        threads: number of threads that encoded it.
    """

    text_megabytes: float
    tokens: float
    bytes_per_id: int
    seconds: float
    measured_seconds: float
    megabytes_per_second: float
    tokens_per_second: float
    threads: int


@dataclass(frozen=True)
class DataReport:
    """Facts about the data of a source.

    Attributes:
        name: name of the source.
        folder: folder of its shards.
        files: number of its train files by kind, such as "JSON lines (.gz)".
        validation_files: number of its files for validation.
        encoding: encoding of the files, or None for binary files.
        documents: number of documents of the train files.
        documents_are_estimated: whether only a part of them was read.
        counts: statistics of the rows that were read, see ``document_counts``.
        special_tokens: how often special tokens of tokenizers occur literally, by token: in text
            files, or in the rows that were read.
        tokenizer: the recipe's tokenizer.
        bytes_per_token: size of the text that was read, divided by its tokens. None if the
            tokenizer is not on this machine.
        cost: estimate of the preparation. None if the tokenizer is not on this machine.
        separated_documents: number of documents if ``flags`` names a document_separator.
        flags: recipe keys that follow from the data, and their values.
    """

    name: str
    folder: str
    files: Mapping[str, int]
    validation_files: int
    encoding: str | None
    documents: int
    documents_are_estimated: bool
    counts: Counts
    special_tokens: Mapping[str, int]
    tokenizer: str
    bytes_per_token: float | None
    cost: Cost | None
    separated_documents: int = 0
    flags: Mapping[str, str] = field(default_factory=dict)

    def findings(self) -> list[Finding]:
        """Return the sentences that describe the data."""
        findings = [self._describe_files(), self._describe_documents()]
        if TEXT_FILES not in self.files:  # a text file is not divided into rows
            findings.append(self._describe_rows())
        findings += [self._describe_special_tokens(), self._describe_tokenizer()]
        if "validation_tokens" in self.flags:
            findings.append(
                Finding(
                    f"{self.name}: the text has no more tokens than validation_tokens, so none "
                    f"are left to train on",
                    f"use --validation_tokens {self.flags['validation_tokens']}, or "
                    f"--validation_files FILE",
                )
            )
        return findings + self._describe_cost()

    def _describe_files(self) -> Finding:
        kinds = [
            pluralize(number, f"{kind} file", f"{kind} files")
            for kind, number in self.files.items()
        ]
        text = f"{self.name}: {', '.join(kinds)}"
        if self.validation_files:
            number = pluralize(self.validation_files, "file", "files")
            text += f" and {number} for validation"
        if self.encoding:
            text += f", encoded in {self.encoding}"
        return Finding(text)

    def _describe_documents(self) -> Finding:
        documents = pluralize(self.documents, "document", "documents")
        if self.documents_are_estimated:
            documents = f"about {documents} (estimated)"
        return Finding(f"{self.name}: {documents}")

    def _describe_rows(self) -> Finding:
        problem = document_counts.describe_missing_text([self.counts])
        if problem:
            sentence, _, fix = problem.rpartition(". ")
            return Finding(f"{self.name}: {sentence}", fix[0].lower() + fix[1:])
        num_missing = self.counts.get(WITHOUT_TEXT, 0)
        num_rows = num_missing + self.counts.get(DOCUMENTS, 0)
        text = f"{self.name}: {num_missing:,} of {num_rows:,} rows have no text"
        if num_missing:
            text += f". They contain: {document_counts.describe_contents(self.counts)}"
        return Finding(text)

    def _describe_special_tokens(self) -> Finding:
        if not self.special_tokens:
            return Finding(f"{self.name}: the text contains no literal special tokens")
        occurrences = [f"{token} ({number:,})" for token, number in self.special_tokens.items()]
        text = (
            f"{self.name}: the text contains literal special tokens, which are read as ordinary "
            f"text: {', '.join(occurrences)}"
        )
        if "document_separator" not in self.flags:
            return Finding(text)
        separator = self.flags["document_separator"]
        return Finding(
            text,
            f"use --document_separator '{separator}', which splits the text into "
            f"{self.separated_documents:,} documents",
        )

    def _describe_tokenizer(self) -> Finding:
        if self.bytes_per_token is None:
            return Finding(
                f"{self.name}: the bytes per token are not known, because the tokenizer "
                f"{self.tokenizer} has not been downloaded"
            )
        return Finding(
            f"{self.name}: {self.bytes_per_token:.2f} bytes per token with the tokenizer "
            f"{self.tokenizer} (measured on the rows that were read)"
        )

    def _describe_cost(self) -> list[Finding]:
        if self.cost is None:
            return []
        cost = self.cost
        threads = pluralize(cost.threads, "thread", "threads")
        return [
            Finding(
                f"{self.name}: about {cost.text_megabytes:,.1f} MB of text, "
                f"{cost.tokens:,.0f} tokens (estimated)"
            ),
            Finding(
                f"{self.folder}: {cost.tokens * cost.bytes_per_id / 1e6:,.3f} MB on disk "
                f"(estimated: {cost.bytes_per_id} bytes per token)"
            ),
            Finding(
                f"{self.name}: prepared in {cost.seconds:,.1f} s at "
                f"{cost.megabytes_per_second:.1f} MB/s of text, "
                f"{cost.tokens_per_second:,.0f} tokens/s "
                f"(measured for {cost.measured_seconds:.0f} s with {threads}, including reading)"
            ),
        ]
