"""Part t: run the tests that need a GPU."""

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.first_card.runner import Part
from benchmarks.runs import ROOT


def gpu_tests(part: Part) -> None:
    """Run the tests marked gpu. A rehearsal only collects them."""
    test_files = sorted((ROOT / "tests").glob("*/test_*.py"))
    marked_files = [path for path in test_files if "mark.gpu" in path.read_text()]
    xml_file = part.work / "tests.xml"
    xml_file.unlink(missing_ok=True)
    command = ["-m", "pytest", "-q", "-m", "gpu", "--continue-on-collection-errors"]
    if part.is_tiny:
        command.append("--collect-only")
    else:
        command.append(f"--junitxml={xml_file}")
        if importlib.util.find_spec("xdist"):
            command += ["-n", "4"]
    output = part.run("tests marked gpu", [*command, *marked_files], ROOT)
    if xml_file.is_file():
        outcomes = read_outcomes(xml_file)
        num_passed = list(outcomes.values()).count("passed")
        part.note(f"{num_passed} of {len(outcomes)} tests marked gpu pass", tests=outcomes)
    elif output:
        last_line = output.strip().splitlines()[-1]
        part.note("the tests marked gpu are only collected", tests=last_line)


def read_outcomes(xml_file: Path) -> dict[str, str]:
    """Return the outcome of each test in a JUnit XML file: passed, failure, error or skipped."""
    outcomes = {}
    for case in ElementTree.parse(xml_file).iter("testcase"):
        # A test that has passed has no element, except for its output.
        elements = [element.tag for element in case if element.tag != "system-out"]
        outcomes[case.get("name")] = elements[0] if elements else "passed"
    return outcomes
