"""The parts of the recipe, one purpose a file. The story that uses them is ``train.py``.

Ground (may be used by every leaf): ``errors`` (bad input ends with exit 2), ``files`` (atomic, durable writes),
``redaction`` (URLs without secrets).

Leaves, in the order in which a run meets them: ``config`` (recipe and flags), ``hardware`` (what the machine can do),
``stream`` (documents of a source), ``tokenization`` (text to ids), ``shards`` (ids on disk, windows, batches),
``model`` (GPT-2 and its loss), ``optim`` (schedule and update), ``checkpoint`` (save, verify, resume),
``stopping`` (signals), ``evaluation`` (validation loss), ``sampling`` (text from a model), ``report`` (terminal,
metrics, meter), ``plots`` (curves.png).
No leaf imports a leaf: each takes plain values and can be read, tested or deleted alone.
"""
