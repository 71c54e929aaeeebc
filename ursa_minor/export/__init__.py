"""Write a model in the formats of other programs.

A trained model and its tokenizer come in; a folder that these programs load goes out.

- ``stock``: weights, config and tokenizer that Transformers' ``from_pretrained`` loads
- ``compression``: pruning and int8 quantization
- ``gguf``: the file format of llama.cpp and Ollama
- ``convert``: the work of ``export_model.py``: export a model, load it again, and measure the loss
  before and after
"""
