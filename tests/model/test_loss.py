"""The loss is the mean over every target, however many logits there are at once."""

import functools
import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from small_models import (
    KINDS,
    backward,
    build_small_model,
    random_ids,
    randomize_weights,
    stock_copy,
)
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2LMHeadModel

from ursa_minor.model import attention
from ursa_minor.model.loss import NextTokenLoss, _ChunkedLoss, loss_module
from ursa_minor.recipe import keys


@pytest.fixture
def model() -> GPT2LMHeadModel:
    return build_small_model()


def test_loss_is_the_mean_over_every_target_and_equal_in_evaluation(model):
    inputs, targets = random_ids(3, 16), random_ids(3, 16).flip(1)
    expected = F.cross_entropy(stock_copy(model)(inputs).logits.flatten(0, 1), targets.flatten())
    module = NextTokenLoss(model)
    assert module(inputs, targets).item() == pytest.approx(expected.item(), abs=1e-5)
    module.rows = 7  # parts that do not divide the rows
    assert module(inputs, targets).item() == pytest.approx(expected.item(), abs=1e-5)
    with torch.no_grad():
        assert module(inputs, targets).item() == pytest.approx(expected.item(), abs=1e-5)


TERMS = [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"label_smoothing": 0.1, "z_loss": 1e-2}]


@pytest.mark.parametrize("vocab_size, whole", [(2**14, False), (2**14 + 64, True)])
def test_a_cpu_makes_few_logits_at_once_where_they_fit_its_cache_and_else_many(
    monkeypatch, vocab_size, whole
):
    made, real = [], F.cross_entropy
    monkeypatch.setattr(
        F,
        "cross_entropy",
        lambda logits, *given, **how: made.append(1) or real(logits, *given, **how),
    )
    inputs = random_ids(17, 16)  # 272 rows
    loss_module(
        build_small_model(vocab_size=vocab_size, n_head=4, n_embd=8, n_layer=1), keys.Loss(), 0
    )(inputs, inputs)
    assert bool(made) == whole


@pytest.mark.parametrize("dtype, terms", [(torch.bfloat16, TERMS[0]), (torch.float16, TERMS[-1])])
def test_loss_in_parts_is_no_less_exact_in_half_precision(model, dtype, terms):
    """Both differ from fp32 by rounding; the parts' sums are in fp32, the whole's in half precision."""
    found = []
    for rows, half in ((1000, None), (1000, dtype), (7, dtype)):
        module = NextTokenLoss(model, **terms)
        module.rows = rows
        with torch.autocast("cpu", half, enabled=half is not None):
            loss = module(random_ids(3, 16), random_ids(3, 16).flip(1))
        found.append(backward(loss * 2.0**10, model))
    for name in ("transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"):
        exact, *others = (each[name] for each in found)
        whole, parts = ((other - exact).norm() / exact.norm() for other in others)
        assert parts < 1.2 * whole + 1e-4 and whole < 0.05, name


def test_a_compiler_gets_one_graph_that_cannot_compute_all_parts_of_the_logits_first():
    """Each part's logits depend on the part before, so its own can be freed; Inductor hoists what is independent."""
    graphs, targets, draw = [], random_ids(48), torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(rows, 32, generator=draw, requires_grad=True) for rows in (48, 64))

    def keep(graph, example_inputs):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    def loss(hidden, head):
        objective, _ = _ChunkedLoss.apply(hidden, head, targets, 16, 0.1, 1e-2)
        return objective

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    expected = torch.autograd.grad(loss(hidden, head), (hidden, head))
    assert_close(
        torch.autograd.grad(compiled(hidden, head), (hidden, head)), expected, rtol=1e-4, atol=1e-6
    )
    logits = [node for node in graphs[0].nodes if node.target == torch.ops.aten.mm.default]
    logits = [node for node in logits if node.meta["val"].shape == (16, 64)]
    assert len(logits) == 3

    def before(node):
        for source in node.all_input_nodes:
            yield source
            yield from before(source)

    for earlier, later in itertools.pairwise(logits):
        assert earlier in before(later)


@pytest.mark.parametrize("rows", [1000, 7], ids=["whole", "parts"])
@pytest.mark.parametrize(
    ("kind", "terms"), [*(("gpt2", terms) for terms in TERMS), ("untied", TERMS[-1])]
)
def test_smoothing_and_z_loss_are_their_formulas_with_either_head(kind, terms, rows):
    model = randomize_weights(
        build_small_model(**KINDS[kind])
    ).train()  # logits far from even, so that each term matters
    inputs, targets = random_ids(3, 16), random_ids(3, 16).flip(1)
    module = NextTokenLoss(model, **terms)
    module.rows = rows
    loss = module(inputs, targets)
    ours = backward(loss, model)
    logits = model(inputs).logits.flatten(0, 1)
    expected = F.cross_entropy(
        logits, targets.flatten(), label_smoothing=terms.get("label_smoothing", 0.0)
    )
    expected = expected + terms.get("z_loss", 0.0) * logits.exp().sum(-1).log().square().mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_close(ours, backward(expected, model), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [1000, 7], ids=["whole", "parts"])
@pytest.mark.parametrize("terms", TERMS)
def test_plain_cross_entropy_comes_with_the_objective(terms, rows):
    model = randomize_weights(build_small_model()).train()
    batch = random_ids(3, 16), random_ids(3, 16).flip(1)
    module = NextTokenLoss(model, **terms)
    module.rows = rows
    with Operations() as seen:
        losses = module(*batch, with_cross_entropy=True)
    assert seen.count["_log_softmax"] <= 1  # one pass over the logits
    with torch.no_grad():
        assert losses.cross_entropy.item() == pytest.approx(module(*batch).item(), abs=1e-6)
    assert (losses.objective is losses.cross_entropy) == (not terms)
    assert losses.cross_entropy.requires_grad == (not terms)
    alone = module(*batch)
    assert torch.equal(losses.objective, alone)
    assert_close(backward(losses.objective, model), backward(alone, model), rtol=0, atol=0)


class Operations(TorchDispatchMode):
    """How large the largest result is of all that runs, and how often each operation runs."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        self.count[function.overloadpacket.__name__] += 1
        for part in result if isinstance(result, tuple | list) else [result]:
            self.largest = max(self.largest, part.numel() if isinstance(part, torch.Tensor) else 0)
        return result


def test_no_term_makes_all_logits_at_once():
    model = build_small_model(vocab_size=512)
    for rows, largest in ((1000, 48 * 512), (7, 512 * 32)):  # every logit; the head itself
        module = NextTokenLoss(model, **TERMS[-1])
        module.rows = rows
        with Operations() as seen:
            module(random_ids(3, 16), random_ids(3, 16).flip(1)).backward()
        assert seen.largest == largest


def test_a_recipes_loss_has_its_terms_in_training_and_reads_documents_alone_always(model):
    inputs, targets = random_ids(3, 16), random_ids(3, 16).flip(1)
    asked = keys.Loss(document_mask=True, label_smoothing=0.1, z_loss=1e-2)
    inputs[:, 7] = 5
    terms = {"label_smoothing": 0.1, "z_loss": 1e-2}
    context = functools.partial(attention.within_documents, separator=5)
    module, expected = loss_module(model, asked, 5), NextTokenLoss(model, context=context, **terms)
    assert torch.equal(module(inputs, targets), expected(inputs, targets))
    with torch.no_grad():
        assert torch.equal(
            module(inputs, targets), NextTokenLoss(model, context=context)(inputs, targets)
        )
    plain = loss_module(model, keys.Loss(), 5)
    assert torch.equal(plain(inputs, targets), NextTokenLoss(model)(inputs, targets))
    assert not torch.equal(plain(inputs, targets), module(inputs, targets))
