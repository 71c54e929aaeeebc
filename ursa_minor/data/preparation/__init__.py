"""Write the token shards of a source into a folder.

``prepare_data.py`` runs this, started by a user or by ``train.py`` in the background.

- ``shard_folder``: lock the folder of a source; repair, write or download its shards
- ``bpe_sample``: select the texts on which a BPE is trained
- ``text_notes``: notes on the contents of a source
- ``overlap``: validation documents that also occur in the train split
- ``prepare``: the main loop: documents -> shards, resumable
- ``repair``: write missing or changed shards again
- ``download``: fetch token files from the Hub
- ``progress``: report progress; how far ahead of training to prepare
- ``offline``: check that access to the Hub is not switched off
- ``measure``: ``--dry_run`` and ``--verify``
- ``data_report``: what ``--dry_run`` finds, as data and as sentences
"""
