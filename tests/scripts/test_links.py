"""Links of the documentation: each file that a page links to exists, and each anchor in it."""

import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

LINK = re.compile(r"\]\(([^()\s]+)\)")
EXTERNAL = ("http://", "https://", "mailto:")


def list_pages() -> list[Path]:
    """Return the Markdown files of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        return sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md"))
    return [ROOT / name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


def read_prose(page: Path) -> str:
    """Return the text of a page without its blocks and spans of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    names: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        number = 0
        candidate = name
        while candidate in names:
            number += 1
            candidate = f"{name}-{number}"
        names.add(candidate)
    return names


def has_target(page: Path, link: str) -> bool:
    """Return whether the file of a link exists and, if the link has an anchor, its heading."""
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return False
    return not anchor or target.suffix != ".md" or anchor in anchors(target)


@pytest.mark.parametrize("page", list_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_files_and_anchors_exist(page):
    links = [link for link in LINK.findall(read_prose(page)) if not link.startswith(EXTERNAL)]

    assert not [link for link in links if not has_target(page, link)]


def test_repeated_headings_have_numbered_anchors(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Use `a.b`, or C\n\n## Again\n\n```\n# code\n```\n\n## Again\n")

    assert anchors(page) == {"use-ab-or-c", "again", "again-1"}
