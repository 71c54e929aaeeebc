"""Write a source's token shards into a folder. ``prepare_data.py`` runs this, by hand or in the background of a run.

- ``prepare``: the main loop: documents -> shards, resumable
- ``repair``: write missing or changed shards again
- ``download``: fetch token files from the Hub
- ``progress``: report progress; how far ahead of training to prepare
- ``measure``: ``--dry_run`` and ``--verify``
"""
