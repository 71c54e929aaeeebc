"""Helpers that every other package uses. Nothing here knows about models or recipes.

- ``errors``: BadInput (exit status 2), TrainingStopped (1), and fixes for operating system errors
- ``cli``: start and end of a script: exit status, Ctrl-C, uncaught errors
- ``launch``: check the variables of torchrun and accelerate launch
- ``console``: log handlers for the terminal and run.log
- ``terminal``: fit text and tables into the width of a terminal
- ``wording``: parts of messages: "did you mean", plurals, lists
- ``redaction``: remove credentials and escape control characters
- ``shell``: quote commands that a message prints
- ``files``: atomic and durable files, locks, hashes
- ``paths``: expand ``~`` and variables; locate the repository
- ``run_files``: names of files in a run folder
- ``checkpoint_files``: list and verify checkpoints
- ``other_checkpoints``: find checkpoints of other trainers and their converted copies
- ``model_id``: parse a folder or Hub id with an optional revision
- ``http``: status and Retry-After of an answer, stalled downloads
- ``retry``: retry network operations
- ``signals``, ``stopping``: signals that stop a run, agreed on by all processes
- ``gpus``: data sheets and measured speeds of GPUs (``gpus.csv``)
- ``cudnn``: known errors of cuDNN versions
"""
