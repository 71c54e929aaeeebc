"""Every file and anchor that a page of the documentation links to exists."""

import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

LINK = re.compile(r"\]\(([^()\s]+)\)")
# "../../actions" is the page of the CI runs on GitHub.
EXTERNAL = ("http://", "https://", "mailto:", "../../actions/")
CODE_BLOCK = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)


def list_pages() -> list[Path]:
    """Return the Markdown files of the repository."""
    command = ["git", "ls-files", "-z", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:  # not a git checkout
        return sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md"))
    paths = [ROOT / name for name in listed.stdout.split("\0")]
    return [path for path in paths if path.is_file()]


def remove_code_blocks(page: Path) -> str:
    """Return the text of a page without its fenced code blocks."""
    return CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))


def read_prose(page: Path) -> str:
    """Return the text of a page without any code."""
    text = remove_code_blocks(page)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    names: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", remove_code_blocks(page), flags=re.MULTILINE):
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
    if not anchor or target.suffix != ".md":
        return True
    return anchor in anchors(target)


@pytest.mark.parametrize("page", list_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_files_and_anchors_exist(page):
    links = LINK.findall(read_prose(page))

    local_links = [link for link in links if not link.startswith(EXTERNAL)]
    assert not [link for link in local_links if not has_target(page, link)]


def test_repeated_headings_have_numbered_anchors(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Use `a.b`, or C\n\n## Again\n\n```\n# code\n```\n\n## Again\n")

    assert anchors(page) == {"use-ab-or-c", "again", "again-1"}
