"""Convert documents to token ids and store them.

- ``tokenizer``: train a tokenizer; encode and decode; bytes of text per token
- ``pretrained_tokenizer``: load a tokenizer from a folder or the Hub
- ``definition``: read parts of the definition of a tokenizer
- ``normalizers``: whether a tokenizer keeps the text that it encodes
- ``split_points``: places at which a text can be cut without changing its ids
- ``token_rows``: rows of ids that another program encoded -> documents
- ``encoder``: documents -> ids, in several threads
- ``document_counts``: statistics of documents and of rows without text
- ``shards``: read and write token files
- ``token_format``: the definition of a token-file format
- ``formats/``: one module per format: llm.c, NumPy, nanoGPT, datatrove, Megatron-LM
- ``documents``: insert the separators that token files of another program lack
- ``manifest``: the list of a folder's shards: read, compare, find damaged files
"""
