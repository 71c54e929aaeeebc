"""Write a model for other programs.

- ``stock``: safetensors, config and tokenizer that ``from_pretrained`` loads
- ``compression``: pruning and int8
- ``gguf``: llama.cpp's format
- ``convert``: the work of ``export_model.py``: read back and measure each export
"""
