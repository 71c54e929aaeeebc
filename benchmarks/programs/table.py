"""Write the table of docs/export.md from benchmarks/results/programs.json.

python -m benchmarks.programs.table
"""

import json
from collections.abc import Iterable, Iterator

from benchmarks import runs
from benchmarks.programs.definitions import EXAMPLE, PROGRAMS, Program

RESULTS = runs.ROOT / "benchmarks" / "results" / "programs.json"
PAGE = runs.ROOT / "docs" / "export.md"
BEGIN = "<!-- make programs writes the lines from here -->\n"
END = "<!-- to here -->\n"
HEADER = (
    "| program | largest difference | equal texts and ids | requirements | known problems and what "
    "to do |\n"
    "|---|---|---|---|---|\n"
)
LLAMA = "llama"  # the kind of model with its own column of differences
NAMES = {
    "logits": "logits",
    "log_probs": "log-probabilities",
    "endings": "log-likelihoods",
    "rolling": "rolling log-likelihoods",
    "ids": "token ids",
    "decoded": "decoded texts",
    "greedy": "greedy texts",
    "chat": "chat template",
    "chat_ids": "ids of a chat",
}


def write_page() -> None:
    """Replace the generated part of docs/export.md."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    generated = generate(results["programs"])
    new_text = before + BEGIN + generated + END + after
    PAGE.write_text(new_text, encoding="utf-8")


def generated_part() -> str:
    """Return the text between the markers of docs/export.md."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    part, _, _ = rest.partition(END)
    return part


def generate(rows: list[dict]) -> str:
    """Return the table, the commands and the example for rows of the JSON file."""
    rows_by_key = {(row["program"], row["version"]): row for row in rows}
    lines = [table_row(program, find(rows_by_key, program)) for program in PROGRAMS]
    parts = [HEADER, *lines, f"\nMeasured with `make programs`: {provenance(rows)}.\n"]
    parts += ["\nThe commands that were run before the models were loaded:\n\n"]
    parts += commands()
    parts += ["\nllama.cpp in Python (`pip install xllamacpp`):\n\n```python\n"]
    parts += [EXAMPLE.read_text(encoding="utf-8"), "```\n"]
    return "".join(parts)


def provenance(rows: list[dict]) -> str:
    """Return the dates, commits and machines of the rows."""
    commits_by_origin: dict[str, set[str]] = {}
    for row in rows:
        origin = f"{row['date']}, {row['machine']}"
        commits = commits_by_origin.setdefault(origin, set())
        commits.add(row["commit"])
    parts = []
    for origin, commits in sorted(commits_by_origin.items()):
        listed = ", ".join(sorted(commits))
        parts.append(f"{origin}, commit {listed}")
    return "; ".join(parts)


def find(rows_by_key: dict, program: Program) -> dict:
    """Return the row of a program. A program without a row was not run."""
    not_run = {"status": "not run", "reason": "not in the results"}
    return rows_by_key.get((program.name, program.version), not_run)


def table_row(program: Program, row: dict) -> str:
    """Return the row of a program."""
    if row["status"] == "not run":
        differences = "not run"
        equal = ""
    elif row["status"] == "failed":
        differences = f"**failed**: {row['reason']}"
        equal = ""
    else:
        lines = [*number_lines(row["results"]), *problem_lines(row["results"])]
        if program.notes:
            lines.append(program.notes)
        differences = "<br>".join(lines)
        equal = "<br>".join(list_lines(row["results"]))
    problems = "<br>".join(f"{problem.text}: {problem.suggestion}" for problem in program.problems)
    cells = [f"{program.name} {program.version}", differences, equal, requirements(program)]
    joined = " | ".join(cell.replace("|", "\\|") for cell in [*cells, problems])
    return f"| {joined} |\n"


def number_lines(results: dict) -> Iterator[str]:
    """Yield the largest difference of each number that was compared, by type of model."""
    for name in names(results, is_list=False):
        parts = []
        for label, kinds in types(results):
            matching = comparisons(results, kinds, name)
            if not matching:
                continue
            largest = max(comparison["difference"] for comparison in matching)
            text = f"{largest:.1e}" if largest else "0"
            if not all(is_within_limit(comparison) for comparison in matching):
                text = f"**{text}**"
            parts.append(f"{label} {text}")
        yield f"{NAMES.get(name, name)}: {', '.join(parts)}"


def problem_lines(results: dict) -> Iterator[str]:
    """Yield errors, and known problems that did not occur."""
    for kind, result in results.items():
        if "error" in result:
            yield f"**{kind} failed**: {result['error']}"
        for name, occurs in result.get("symptoms", {}).items():
            if not occurs:
                yield f"**{kind}: a known problem did not occur ({name})**"


def list_lines(results: dict) -> Iterator[str]:
    """Yield the number of equal texts or lists of ids for each comparison."""
    for name in names(results, is_list=True):
        matching = comparisons(results, results, name)
        total = sum(comparison["total"] for comparison in matching)
        num_different = sum(int(comparison["difference"]) for comparison in matching)
        label = NAMES[name]
        if not name.startswith("chat"):
            label = f"{total} {label}"
        if num_different == 0:
            yield label
        elif all(is_within_limit(comparison) for comparison in matching):
            yield f"{label}, except {num_different}"
        else:
            yield f"**{label}, except {num_different}**"


def names(results: dict, *, is_list: bool) -> list[str]:
    """Return the names of the comparisons of lists, or of numbers."""
    names_of_kind = []
    for comparison in all_comparisons(results, results):
        compares_lists = comparison["total"] is not None
        name = comparison["compared"]
        if compares_lists == is_list and name not in names_of_kind:
            names_of_kind.append(name)
    return names_of_kind


def comparisons(results: dict, kinds: Iterable[str], name: str) -> list[dict]:
    """Return the comparisons with a name for these kinds of models."""
    return [
        comparison
        for comparison in all_comparisons(results, kinds)
        if comparison["compared"] == name
    ]


def all_comparisons(results: dict, kinds: Iterable[str]) -> Iterator[dict]:
    """Yield the comparisons for these kinds of models."""
    for kind in kinds:
        yield from results[kind].get("comparisons", [])


def is_within_limit(comparison: dict) -> bool:
    """Return whether a difference is a number within its limit. NaN is not."""
    return comparison["difference"] <= comparison["limit"]


def types(results: dict) -> list[tuple[str, list[str]]]:
    """Return the kinds of models by type: GPT-2 and Llama type."""
    gpt2 = [kind for kind in results if kind != LLAMA]
    llama = [kind for kind in results if kind == LLAMA]
    return [("GPT-2", gpt2), ("Llama type", llama)]


def requirements(program: Program) -> str:
    """Return the packages of a program's environment."""
    if program.packages is None:
        return "requirements.txt"
    packages = list(program.packages)
    if program.needs_torch:
        packages.insert(0, "torch==2.13.0")
    manager = "npm" if program.npm else "pip"
    return f"{manager} install " + " ".join(f"`{package}`" for package in packages)


def commands() -> Iterator[str]:
    """Yield the commands of each program as lines of a code block."""
    for program in PROGRAMS:
        for command in program.commands:
            yield "    " + command.format(model=f"exports/{program.models['gpt2']}") + "\n"


if __name__ == "__main__":
    write_page()
