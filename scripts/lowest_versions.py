"""Print constraints that select the lowest permitted version of each package.

    python scripts/lowest_versions.py > lowest.txt

The output has a line for each package in requirements.txt. CI runs the tests with these versions.
The packages in requirements/, such as the test tools, keep the versions of constraints.txt.
"""

import sys
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def lowest_versions(requirements: str) -> dict[str, str]:
    """Return the lower bound of each package in the text of a requirements file.

    Raises:
        ValueError: a package has no lower bound.
    """
    versions = {}
    for line in requirements.splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        bounds = [part.version for part in requirement.specifier if part.operator == ">="]
        if len(bounds) != 1:
            raise ValueError(f"requirements.txt: {requirement.name} needs one lower bound (>=)")
        versions[requirement.name] = bounds[0]
    return versions


def lowest_constraints(requirements: str, constraints: str) -> str:
    """Return ``constraints`` with the lower bounds of ``requirements`` as versions."""
    lowest = lowest_versions(requirements)
    lines = []
    for line in constraints.splitlines():
        name = line.partition("==")[0]
        if name in lowest:
            line = f"{name}=={lowest[name]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the constraints."""
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    sys.stdout.write(lowest_constraints(requirements, constraints))
    return 0


if __name__ == "__main__":
    sys.exit(main())
