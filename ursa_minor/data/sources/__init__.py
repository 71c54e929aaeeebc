"""Find the text of a run and read it as documents.

A data section of the recipe goes in; documents in a fixed order come out, with the position of each.

- ``find``: which source a recipe names, its identity, its splits
- ``files``: paths, glob patterns and URLs -> files
- ``stdlib``: Python's standard library as text
- ``remote``: open, download and unpack files
- ``tables``: data sets of the Hub and table files, resumable
- ``columns``: the column that contains the text
- ``formats``: one module per file format
"""
