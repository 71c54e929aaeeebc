"""Stock models of Transformers and their loss.

- ``architectures``: definition of each family: config, names, parameter count
- ``build``: recipe -> model, with random or pretrained weights
- ``pretrained``: load ``init_from`` and models to evaluate
- ``resolve``: run, folder or Hub id -> model folder
- ``adapters``: reject PEFT adapters
- ``attention``: causal attention for training, document masks
- ``loss``: the chunked cross entropy
- ``gpt2_norms``: LayerNorms under autocast and torch.compile
- ``vocabulary``: a row of the embedding for each token id
- ``dtypes``: torch dtypes by the name of the precision
- ``precision``, ``finite``: precision of a loaded model; reject NaN and infinity
"""
