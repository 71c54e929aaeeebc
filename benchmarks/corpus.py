"""Make a corpus of real text without a data host: Debian's documentation, and the Python sources of installed packages.

    python benchmarks/corpus.py --out corpus.jsonl --megabytes 48

Half of the bytes are text of HTML pages of Debian packages (downloaded by apt-get, unpacked, not installed), half Python
sources. Each page and each source is a document, taken once; their order is shuffled. The same packages give the same file.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import html.parser
import importlib.metadata
import json
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator

DEBIAN = (
    "debian-reference-en",
    "developers-reference",
    "git-doc",
    "linux-doc-6.1",
    "postgresql-doc-15",
    "python3.11-doc",
)
WHEELS = ("accelerate", "datasets", "numpy", "pandas", "tokenizers", "torch", "transformers")


class Text(html.parser.HTMLParser):
    """Gathers a page's text, without scripts, styles, menus."""

    LEFT_OUT = ("script", "style", "nav", "head", "footer")
    BREAKS = ("p", "div", "li", "tr", "pre", "br", "h1", "h2", "h3", "h4", "dt", "dd")

    def __init__(self, page: str):
        super().__init__()
        self.parts: list[str] = []
        self.within = 0
        self.feed(page)

    def handle_starttag(self, tag, attrs) -> None:
        """Begin a part that is left out, or a line."""
        self.within += tag in self.LEFT_OUT
        if tag in self.BREAKS:
            self.parts.append("\n")

    def handle_endtag(self, tag) -> None:
        """End a part that is left out."""
        self.within -= tag in self.LEFT_OUT and self.within > 0

    def handle_data(self, data) -> None:
        """Take text."""
        if not self.within:
            self.parts.append(data)

    def text(self) -> str:
        """Return it, with at most one empty line in a row."""
        return re.sub(r"\n\s*\n+", "\n\n", "".join(self.parts)).strip()


def debian_pages(package: str) -> Iterator[str]:
    """Yield the text of each HTML page of a Debian package."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
        (archive,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", str(archive), "unpacked"], cwd=folder, check=True)
        for page in sorted(Path(folder, "unpacked").rglob("*.html")):
            if page.is_file() and not page.is_symlink():
                yield Text(page.read_text(encoding="utf-8", errors="replace")).text()


def python_sources(package: str) -> Iterator[str]:
    """Yield each Python source of an installed package."""
    for file in sorted(importlib.metadata.files(package) or (), key=str):
        if file.suffix == ".py":
            yield Path(file.locate()).read_text(encoding="utf-8", errors="replace")


def chosen(documents: list[str], most_bytes: float, chance: random.Random) -> list[str]:
    """Return documents in a random order, each once, none under 500 characters, up to so many bytes."""
    taken: dict[str, int] = {}
    chance.shuffle(documents)
    for document in documents:
        if sum(taken.values()) >= most_bytes:
            break
        if len(document) >= 500:
            taken[document] = len(document.encode())
    return list(taken)


def main(argv: list[str] | None = None) -> int:
    """Write the corpus as JSON lines, a ``text`` each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, default=48, help="of text, half of each kind")
    asked = parser.parse_args(argv)
    chance, documents = random.Random(0), []
    for kind, read, packages in (("pages", debian_pages, DEBIAN), ("sources", python_sources, WHEELS)):
        found = [document for package in packages for document in read(package)]
        taken = chosen(found, asked.megabytes * 5e5, chance)
        print(f"{kind}: {len(taken):,} of {len(found):,}, {sum(len(text.encode()) for text in taken) / 1e6:.1f} MB")
        documents += taken
    chance.shuffle(documents)
    with asked.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents)
    print(f"{asked.out}: {len(documents):,} documents, {asked.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
