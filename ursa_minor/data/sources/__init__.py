"""Find the text of a run and read it as documents.

The data section of a recipe goes in. Documents in a fixed order come out, each with its position.

- ``find``: which source a recipe names, its identity, its splits
- ``files``: paths, glob patterns and URLs -> files
- ``table_folders``: folders of tables that other programs write
- ``dataset_id``: check the id of a data set of the Hub
- ``hub_dataset``: data set of the Hub -> the files of its splits
- ``stdlib``: Python's standard library as text
- ``remote``: open, download and decompress files
- ``separated_text``: split text files into documents at a separator
- ``tables``: data sets of the Hub and files of tables, resumable
- ``columns``: the column that contains the text
- ``text_checks``: text files that contain JSON lines, tab-separated columns or HTML
- ``encodings``: why a file is not UTF-8 text, and how to convert it
- ``json_documents``: why a file is not JSON lines, and how to convert it
- ``formats``: one module per file format
"""
