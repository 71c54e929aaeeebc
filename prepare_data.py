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

from ursa_minor.base import console
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.base.signals import ignore_warnings
from ursa_minor.base.wording import pluralize
from ursa_minor.data.preparation import measure
from ursa_minor.data.preparation.progress import PrefetchTarget
from ursa_minor.data.preparation.shard_folder import complete_folder
from ursa_minor.data.sources import find as find_sources
from ursa_minor.data.sources.find import FoundSource
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.hub import client
from ursa_minor.recipe import command_line, keys, loading

log = logging.getLogger("ursa_minor")

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
    "source": (int, "Prepare only the source with this number, from 0. Default: all sources."),
    "follow": (
        bool,
        "For train.py, which starts this script: read from standard input how far to go, and exit "
        "when it is closed.",
    ),
}


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Prepare the recipe's data and print the folders that contain it."""
    client.set_client_timeouts()
    argv = sys.argv[1:] if argv is None else argv
    flags, options = command_line.read_flags(
        argv, "Tokenize the text of a recipe into folders of token shards.", EXTRAS
    )
    is_reader = "follow" in options
    recipe = load_recipe(flags, is_reader=is_reader)
    console.start(stream=sys.stdout if is_reader else None)  # train.py reads it from there
    if "verify" in options:
        folder = Path(command_line.expand_option("verify", options["verify"]))
        # With init_from, the vocabulary is that of the model.
        print(measure.verify(folder, recipe.model.vocab_size or 2**32))
        return 0

    target = None
    if is_reader:
        # train.py stops at the warning signals, and closes the standard input of this process.
        ignore_warnings()
        target = PrefetchTarget(recipe)
    selected = select_sources(recipe, options.get("source"))
    has_fetched = "prefetch" in options and prefetch(recipe)
    all_sources = recipe.data.resolved_sources
    is_prepared = all(source.is_token_folder for source in all_sources)
    if is_prepared and "prefetch" not in options:
        raise BadInput(
            f"data_dir = {all_sources[0].data_dir} is already a folder of token shards. "
            f"There is nothing to prepare"
        )
    for config in selected:
        if config.is_token_folder:
            continue
        source = find_sources.find_source(config)
        if "dry_run" in options:
            print(estimate(source))
            continue
        complete_folder(source, target)
        if not is_reader:
            print(source.folder)
    if "prefetch" in options:
        print_offline_instructions(recipe, argv, has_fetched=has_fetched)
    return 0


def load_recipe(flags: dict[str, Any], *, is_reader: bool) -> keys.Recipe:
    """Load the recipe with the flags of the command line.

    Args:
        is_reader: whether train.py started this process. Then train.py logs the notes on the
            recipe, and more flags have an effect, because it may run with --eval_only.
    """
    silenced = "ursa_minor.recipe" if is_reader else "ursa_minor.recipe.loading"
    logging.getLogger(silenced).setLevel(logging.WARNING)
    path = command_line.find_recipe(flags.pop("recipe", loading.DEFAULT_RECIPE))
    modes = ("eval_only",) if is_reader else ()
    return loading.load_recipe(path, flags, modes=modes)


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
        from ursa_minor.data.preparation import (
            download,
        )  # slow to import, and text does not need it

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
    home = shlex.quote(constants.HF_HOME)
    print(f"Copy this folder, the installed packages, and: {unique_paths}")
    print("Then train without a network (accelerate launch train.py takes the same options):")
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

    log.info(
        f"downloading the tokenizer, the model and the tasks into {constants.HF_HOME}; "
        f"without a network, this fails after a minute"
    )
    if recipe.model.init_from:
        pretrained.load(recipe.model.init_from)
    if needs_tokenizer:
        tokenization.load(recipe.data.tokenizer)
    for task in tasks:
        task_data.fetch(task_data.all_tasks()[task])
    return True


if __name__ == "__main__":
    sys.exit(main())
