"""The whole of a sharded model, two processes over gloo; and a model that is not sharded."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

from pretrain.machine import sharding
from pretrain.model.build import build
from pretrain.model.loss import NextTokenLoss
from pretrain.recipe import keys

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "sequence_length": 16, "seed": 1}
SHAPE |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
IDS = torch.arange(32).reshape(2, 16)


def test_a_model_that_is_not_sharded_is_its_own_whole():
    model = torch.nn.Linear(2, 2)
    with sharding.WholeModel(model, None, torch.device("cpu"))() as whole:
        assert whole is model


def compute_alone(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = build(keys.Model(**SHAPE), eos_token_id=0)
    expected = NextTokenLoss(model)(IDS, IDS).item()
    module = NextTokenLoss(model)
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(module)
    other = keys.Model(**SHAPE | {"seed": 2})
    with sharding.WholeModel(model, other, torch.device("cpu"))() as whole:
        for _ in range(rank):  # one process evaluates, the other does not: nothing is exchanged
            assert NextTokenLoss(whole)(IDS, IDS).item() == expected
    dist.barrier()
    dist.destroy_process_group()


def test_a_sharded_model_is_whole_on_a_process_that_computes_alone(tmp_path):
    mp.start_processes(compute_alone, (str(tmp_path / "meet"),), nprocs=2, start_method="fork")
