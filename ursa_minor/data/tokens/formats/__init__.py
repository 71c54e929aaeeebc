"""Formats of token files. Each module supports one format, which ``shards.FORMATS`` lists."""
