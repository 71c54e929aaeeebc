"""Stock models of Transformers and their loss.

The model keys of a recipe go in. A model comes out, and a module that computes its loss.

- ``architectures``: definition of each architecture: config, names, parameter count
- ``build``: recipe -> model, with random or pretrained weights
- ``pretrained``: load ``init_from`` and models to evaluate
- ``resolve``: run folder, model folder or Hub id -> model to load
- ``model_list``: the models of several paths or a pattern, with their steps and tokens
- ``import_checkpoint``: convert checkpoints of other trainers
- ``weight_names``: prefixes of torch.compile, DistributedDataParallel and Lightning in weight names
- ``adapters``: reject PEFT adapters
- ``attention``: causal attention for training, document masks
- ``loss``: the chunked cross entropy
- ``gpt2_norms``: LayerNorms under autocast and torch.compile
- ``vocabulary``: a row of the embedding for each token id
- ``dtypes``: torch dtypes by the name of the precision
- ``precision``, ``finite``: precision of a loaded model; reject NaN and infinity
"""
