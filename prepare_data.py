"""Tokenize the text of a recipe and write it into folders of token shards.

    python prepare_data.py --recipe recipes/own_text.yaml --data_files my.txt
    python prepare_data.py --recipe recipes/gpt2_124m.yaml --dry_run
    python prepare_data.py --verify data/fineweb-edu-0123456789ab
    HF_HOME=/shared/hf python prepare_data.py --recipe recipes/gpt2_124m.yaml --prefetch

The last command downloads everything that training without a network needs.

The recipe and the options are those of train.py, which starts this script in the background
(``--follow``) if shards are missing. After a stop or a kill, the same command continues:
manifest.json, which is replaced after each shard, contains the row at which the next shard starts.
Every byte of existing shards is checked. Missing and changed shards are written again with the
same bytes.
"""

import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ursa_minor.base import console, terminal
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.base.signals import ignore_stop_signals
from ursa_minor.base.wording import pluralize
from ursa_minor.data.preparation import measure
from ursa_minor.data.preparation.offline import check_online
from ursa_minor.data.preparation.progress import PrefetchTarget
from ursa_minor.data.preparation.shard_folder import complete_folder
from ursa_minor.data.sources import find as find_sources
from ursa_minor.data.sources.find import FoundSource
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.hub import client
from ursa_minor.model.resolve import convert_others_in, resolve_model
from ursa_minor.recipe import command_line, keys, loading, rules

log = logging.getLogger("ursa_minor")

LARGEST_VOCABULARY = 2**32  # ids have at most 32 bits

EXTRAS = {
    "verify": (Path, "Check every byte of the token shards in this folder, and exit."),
    "dry_run": (
        bool,
        "Encode text for some seconds, and print an estimate of the size on disk and of the time "
        "for all of it. Nothing is written.",
    ),
    "prefetch": (
        bool,
        "Also download the tokenizer, the init_from model and the tasks, so that train.py needs "
        "no network (HF_HUB_OFFLINE=1).",
    ),
    "source": (int, "Prepare only the source with this number, from 0. (default: all sources)"),
    "follow": (
        bool,
        "For train.py, which starts this script: read from standard input how far to go, and exit "
        "when it is closed.",
    ),
}


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Prepare the recipe's data and print the folders that contain it."""
    client.set_timeouts()
    argv = sys.argv[1:] if argv is None else argv
    flags, options = command_line.read_flags(
        argv, "Tokenize the text of a recipe into folders of token shards.", EXTRAS
    )
    serves_training = "follow" in options  # train.py has started this process
    recipe = load_recipe(flags, serves_training=serves_training)
    # train.py reads the log lines from standard output.
    console.start(stream=sys.stdout if serves_training else None)
    if "verify" in options:
        folder = Path(command_line.expand_option("verify", options["verify"]))
        # Without a stated vocabulary (init_from), ids are not compared with it.
        result = measure.verify(folder, recipe.model.vocab_size or LARGEST_VOCABULARY)
        print(terminal.wrap(result, terminal.width_of(sys.stdout)))
        return 0

    convert_others_in(recipe)
    target = None
    if serves_training:
        # train.py handles the signals that stop a run, and then closes our standard input.
        ignore_stop_signals()
        target = PrefetchTarget(recipe)
    selected = select_sources(recipe, options.get("source"))
    if "prefetch" in options:
        has_fetched = prefetch(recipe)
        prepare(selected, target, is_estimate="dry_run" in options, prints=not serves_training)
        print_offline_instructions(recipe, argv, has_fetched=has_fetched)
        return 0

    all_sources = recipe.data.resolved_sources
    if all(source.is_token_folder for source in all_sources):
        raise BadInput(
            f"data_dir = {all_sources[0].data_dir} is already a folder of token shards. "
            f"There is nothing to prepare"
        )
    prepare(selected, target, is_estimate="dry_run" in options, prints=not serves_training)
    return 0


def prepare(
    sources: Sequence[keys.DataSource],
    target: PrefetchTarget | None,
    *,
    is_estimate: bool,
    prints: bool,
) -> None:
    """Prepare the sources that are not folders of token shards already.

    Args:
        sources: the sources.
        target: how far train.py needs the data, or None to prepare all of it.
        is_estimate: whether only an estimate of size and time is printed.
        prints: whether the folder of each source is printed.
    """
    for config in sources:
        if config.is_token_folder:
            continue
        check_online(config)
        source = find_sources.find_source(config)
        if is_estimate:
            print(terminal.wrap(estimate(source), terminal.width_of(sys.stdout), indent="    "))
            continue
        complete_folder(source, target)
        if prints:
            print(source.folder)


def load_recipe(flags: dict[str, Any], *, serves_training: bool) -> keys.Recipe:
    """Load the recipe with the flags of the command line.

    Args:
        serves_training: whether train.py started this process. Then train.py logs the notes on the
            recipe, and more flags have an effect, because it may run with --eval_only.
    """
    silenced = "ursa_minor.recipe" if serves_training else "ursa_minor.recipe.loading"
    logging.getLogger(silenced).setLevel(logging.WARNING)
    path = command_line.find_recipe(flags.pop("recipe", loading.DEFAULT_RECIPE))
    modes = ("eval_only",) if serves_training else ()
    return loading.load_recipe(path, flags, modes, needs_length=False)


def select_sources(recipe: keys.Recipe, number: int | None) -> Sequence[keys.DataSource]:
    """Return the source with this number, or all sources of the recipe if it is None."""
    sources = recipe.data.resolved_sources
    if number is None:
        return sources
    if not 0 <= number < len(sources):
        count = pluralize(len(sources), "source", "sources")
        raise BadInput(f"--source {number}: the recipe has {count}, and their numbers start at 0")
    return sources[number : number + 1]


def estimate(source: FoundSource) -> str:
    """Return the size of the shards of a source and the time that their preparation takes."""
    if source.repository:
        # This import is slow, and text does not need it.
        from ursa_minor.data.preparation import download

        return download.describe(source)
    return measure.dry_run(source)


def print_offline_instructions(
    recipe: keys.Recipe, argv: Sequence[str], *, has_fetched: bool
) -> None:
    """Print what to copy to a machine without a network, and the command to run there.

    Args:
        has_fetched: whether ``prefetch`` has put anything into HF_HOME.
    """
    from huggingface_hub import constants

    folders = [recipe.data.prepared_data_dir]
    if has_fetched:
        folders.insert(0, constants.HF_HOME)
    paths = [folder for folder in folders if Path(folder).is_dir()]
    paths += recipe.data.data_files or ()
    paths += recipe.data.validation_files or ()
    for task in recipe.evaluation.tasks:
        paths += recipe.evaluation.files_of(task) or ()
    unique_paths = ", ".join(dict.fromkeys(paths))
    options = shlex.join(word for word in argv if word != "--prefetch")
    if list(rules.epoch_problems(keys.to_dict(recipe))):
        options += " --max_steps N"  # training cannot compute it from the epochs
    home = shlex.quote(constants.HF_HOME)
    print(f"Copy this folder, the installed packages, and: {unique_paths}")
    print(
        "Then train without a network (accelerate launch --quiet train.py takes the same options):"
    )
    print(f"HF_HUB_OFFLINE=1 HF_HOME={home} python train.py {options}")


def prefetch(recipe: keys.Recipe) -> bool:
    """Download the model, the tokenizer and the tasks of a run into HF_HOME.

    Returns:
        Whether the run needs any of them.

    Raises:
        BadInput: one of them cannot be downloaded.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils.logging import set_verbosity_error
    from transformers.utils.logging import disable_progress_bar

    from ursa_minor.evaluation import task_data
    from ursa_minor.model import pretrained

    disable_progress_bar()
    set_verbosity_error()  # the client would log each of its retries
    needs_tokenizer = recipe.data.tokenizer not in keys.TRAINED_TOKENIZERS
    tasks = []
    if recipe.evaluation.task_steps:
        tasks = [task for task in recipe.evaluation.tasks if not recipe.evaluation.files_of(task)]
    if not (recipe.model.init_from or needs_tokenizer or tasks):
        return False

    downloads = []
    if recipe.model.init_from:
        downloads.append("the model")
    if needs_tokenizer:
        downloads.append("the tokenizer")
    if tasks:
        downloads.append("the tasks")
    log.info(
        f"downloading {', '.join(downloads)} into {constants.HF_HOME}. Without a network, the "
        f"download fails after about a minute"
    )
    if recipe.model.init_from:
        pretrained.load(resolve_model(recipe.model.init_from, "init_from = "))
    if needs_tokenizer:
        pretrained_tokenizer.load(recipe.data.tokenizer)
    for task in tasks:
        task_data.fetch(task_data.all_tasks()[task])
    return True


if __name__ == "__main__":
    sys.exit(main())
