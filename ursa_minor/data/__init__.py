"""From documents to batches: sources, tokens, shards on disk, windows in an order that is a pure function of the step."""
