"""Parse the command line of train.py and check that its files exist. Imports no torch."""

from collections.abc import Sequence

from ursa_minor.recipe import command_line


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
