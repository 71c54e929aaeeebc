"""Part t: run the tests that need a GPU."""

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.first_card.runner import Part
from benchmarks.runs import ROOT, last_line


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
        num_tests = len(outcomes)
        num_passed = list(outcomes.values()).count("passed")
        part.note(f"{num_passed} of {num_tests} tests marked gpu pass", tests=outcomes)
    elif output:
        part.note("the tests marked gpu are only collected", tests=last_line(output))


def read_outcomes(xml_file: Path) -> dict[str, str]:
    """Return the outcome of each test in a JUnit XML file: passed, failure, error or skipped."""
    outcomes = {}
    document = ElementTree.parse(xml_file)
    for case in document.iter("testcase"):
        name = case.get("name")
        # A test that has passed has no element, except for its output.
        elements = [element.tag for element in case if element.tag != "system-out"]
        outcome = "passed"
        if elements:
            outcome = elements[0]
        outcomes[name] = outcome
    return outcomes
