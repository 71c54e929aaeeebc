"""Turn a recipe's text into folders of token shards, once: documents -> tokenizer -> ids -> shards.

    python prepare_data.py --recipe recipes/own_text.yaml --data_files my.txt
    python prepare_data.py --recipe recipes/gpt2_124m.yaml --dry_run
    python prepare_data.py --verify data/fineweb-edu-0123456789ab
    HF_HOME=/shared/hf python prepare_data.py --recipe recipes/gpt2_124m.yaml --prefetch    # to train without a network

It takes the same recipe and flags as train.py, which starts it in the background (``--follow``) when the shards are
not all there. The same command resumes where a stopped or killed one was: manifest.json, replaced after each shard,
says which row of which file comes next. Of shards that are there it checks every byte, and makes again, to the same
bytes, those that are missing or have changed.
"""

import contextlib
import logging
import shlex
import sys
import time
from pathlib import Path

from ursa_minor.base import console, files
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.base.signals import ignore_warnings
from ursa_minor.data.preparation import measure, prepare, repair
from ursa_minor.data.preparation.progress import PrefetchTarget
from ursa_minor.data.sources import find as find_sources
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.hub import client
from ursa_minor.recipe import command_line, keys, loading

log = logging.getLogger("ursa_minor")

BUSY, BUSY_SECONDS = (
    75,
    10.0,
)  # the exit status while another process has the folder (EX_TEMPFAIL); between two tries
EXTRAS = {
    "verify": (str, "check every byte of this folder of shards, and stop"),
    "dry_run": (bool, "read for some seconds and print the size on disk and the time of all of it"),
    "prefetch": (
        bool,
        "also fetch tokenizer, init_from and tasks: train.py then needs no network (HF_HUB_OFFLINE=1)",
    ),
    "source": (int, "only this one of the recipe's sources; from 0"),
    "follow": (
        bool,
        "started by train.py: standard input says how far to go, and closes when that process dies",
    ),
}


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Prepare the recipe's data and print where it lies."""
    client.bound_client()
    argv = sys.argv[1:] if argv is None else argv
    flags, extras = command_line.read_flags(argv, "Turn text into folders of token shards.", EXTRAS)
    is_reader = "follow" in extras
    # Notes on training concern only train.py, which also logs those on the data for its own reader.
    silenced = "ursa_minor.recipe" if is_reader else "ursa_minor.recipe.loading"
    logging.getLogger(silenced).setLevel(logging.WARNING)
    path = command_line.find_recipe(flags.pop("recipe", loading.DEFAULT_RECIPE))
    # A reader may serve `train.py --eval_only`, where more flags have an effect.
    recipe = loading.load_recipe(path, flags, modes=("eval_only",) if is_reader else ())
    console.start(stream=sys.stdout if "follow" in extras else None)  # train.py reads it from there
    if "follow" in extras:
        ignore_warnings()  # train.py stops at them and then closes standard input
    if "verify" in extras:
        # A model that is begun from has its own vocabulary.
        folder = Path(command_line.expand_option("verify", extras["verify"]))
        print(measure.verify(folder, recipe.model.vocab_size or 2**32))
        return 0
    target = PrefetchTarget(recipe) if "follow" in extras else None
    found = keys.sources(recipe.data)
    if not 0 <= (only := extras.get("source", 0)) < len(found):
        raise BadInput(f"--source {only}: the recipe has {len(found)}, numbered from 0")
    if "prefetch" in extras:
        fetched = prefetch(recipe)
    elif all(map(keys.is_here, found)):
        raise BadInput(
            f"data_dir = {found[0].data_dir} is a folder of shards already: there is nothing to prepare"
        )
    for index, asked in enumerate(found):
        if keys.is_here(asked) or extras.get("source", index) != index:
            continue
        source = find_sources.find_source(asked)
        if source.repository:
            from ursa_minor.data.preparation import (
                download,
            )  # imports datasets, which text does not need
        if "dry_run" in extras:
            print(download.describe(source) if source.repository else measure.dry_run(source))
            continue
        folder = source.folder
        folder.mkdir(parents=True, exist_ok=True)
        busy = f"{folder} is being prepared by process {{pid}}; wait for it"
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(files.locked(folder / prepare.LOCK, busy, BUSY))
                    break
                except BadInput as error:
                    if not target or error.status != BUSY:
                        raise
                    log.info(
                        str(error)
                    )  # on a shared disk another machine's reader; or the last one, dying
                    time.sleep(BUSY_SECONDS)
            if source.repository:
                download.fetch(source, target)
            else:
                repair.repair(source, every=target is None)
                if not manifests.is_complete(folder):
                    prepare.prepare(source, target)
        if target is None:
            print(folder)
    if "prefetch" in extras:
        from huggingface_hub import constants

        words = shlex.join(word for word in argv if word != "--prefetch")
        mine = [*(recipe.data.data_files or ()), *(recipe.data.validation_files or ())]
        mine += [
            file
            for name in recipe.evaluation.tasks
            for file in recipe.evaluation.files_of(name) or ()
        ]
        cache = [constants.HF_HOME] if fetched else []  # of the Hub
        places = [name for name in (*cache, recipe.data.prepared_data_dir) if Path(name).is_dir()]
        print(
            f"to carry beside this folder and its packages: {', '.join(dict.fromkeys([*places, *mine]))}"
        )
        print("accelerate launch --config_file YAML train.py takes the flags of the next line, too")
        print(
            f"without a network: HF_HUB_OFFLINE=1 HF_HOME={shlex.quote(constants.HF_HOME)} python train.py {words}"
        )
    return 0


def prefetch(recipe: keys.Recipe) -> bool:
    """Fetch into HF_HOME what a run asks the Hub for beside its data: the model that it begins from, tokenizer, tasks.

    Returns whether there was anything.

    Raises BadInput where one of them cannot be had.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils.logging import set_verbosity_error
    from transformers.utils.logging import disable_progress_bar

    from ursa_minor.evaluation import task_data
    from ursa_minor.model import pretrained

    disable_progress_bar()
    set_verbosity_error()  # of the client, whose own retries are as many lines
    wanted, evaluation = recipe.data.tokenizer not in keys.TRAINED_TOKENIZERS, recipe.evaluation
    tasks = [
        name for name in evaluation.tasks if evaluation.task_steps and not evaluation.files_of(name)
    ]
    if not (recipe.model.init_from or wanted or tasks):
        return False
    log.info(
        f"fetching tokenizer, model, tasks into {constants.HF_HOME}; without a network it fails after a minute"
    )
    if recipe.model.init_from:
        pretrained.load(recipe.model.init_from)
    if wanted:
        tokenization.load(recipe.data.tokenizer)
    for name in tasks:
        task_data.fetch(task_data.records()[name])
    return True


if __name__ == "__main__":
    sys.exit(main())
