"""Data of a run: documents -> token ids -> shards on disk -> batches.

    sources -> tokens -> preparation (writes shards)
                      -> loading     (reads shards, yields batches)

Layers: ``sources`` < ``tokens`` < ``preparation``, ``loading``.
"""
