"""Parse and write command lines of train.py. Imports no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from ursa_minor.base import paths
from ursa_minor.recipe import command_line

# Flags of a proposed command for a recipe that names no data, such as own_text.
DATA_PLACEHOLDER = {"data_files": ["FILE"]}
# The same for a recipe in epochs whose number of steps is not known before training.
LENGTH_PLACEHOLDER = {"max_steps": "N"}


def parse(argv: Sequence[str]) -> command_line.TrainCommand:
    """Parse the command line of train.py.

    Raises:
        BadInput: the command line, the recipe or the launch is wrong, or a local file of a source
            does not exist, or access to the Hub is switched off and a source needs it.
    """
    command = command_line.parse_training(argv)
    if command.recipe is not None:
        # Slow to import, and --help does not need them.
        from ursa_minor.data.preparation import offline
        from ursa_minor.data.sources import find

        for source in command.recipe.data.resolved_sources:
            find.check_source_exists(source)
            # An evaluation needs the validation split only, which may be prepared.
            if "eval_only" not in command.modes:
                offline.check_online(source)
    return command


def quoted(recipe_path: str, flags: Mapping[str, Any]) -> str:
    """Return the words from ``train.py`` on of a command that a message prints.

    Args:
        recipe_path: path of the recipe.
        flags: recipe keys and their values, which may be lists.
    """
    recipe_flag = f"--recipe {paths.quoted(recipe_path)}"
    return f"train.py {recipe_flag} {command_line.quoted_flags(flags)}".rstrip()
