"""The loss is the mean over all targets, however many logits are computed at a time."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator

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
from transformers import GPT2LMHeadModel, PreTrainedModel

from ursa_minor.model import attention
from ursa_minor.model.loss import NextTokenLoss, _ChunkedLoss, loss_module
from ursa_minor.recipe import keys

SMOOTHING = {"label_smoothing": 0.1}
Z_LOSS = {"z_loss": 1e-2}
BOTH_TERMS = SMOOTHING | Z_LOSS
TERMS = [{}, SMOOTHING, Z_LOSS, BOTH_TERMS]
TERM_NAMES = ["plain", "smoothing", "z_loss", "both"]
ALL_ROWS = 1000  # more than the batch has
FEW_ROWS = 7  # does not divide the 48 rows of the batch
each_number_of_rows = pytest.mark.parametrize("rows", [ALL_ROWS, FEW_ROWS], ids=["whole", "parts"])


@pytest.fixture
def model() -> GPT2LMHeadModel:
    """A small GPT-2."""
    return build_small_model()


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets: 3 sequences of 16 ids."""
    inputs = random_ids(3, 16)
    return inputs, inputs.flip(1)


def make_loss(model: PreTrainedModel, rows: int, **terms) -> NextTokenLoss:
    """Return a loss that computes the logits of this many rows at a time."""
    module = NextTokenLoss(model, **terms)
    module.rows = rows
    return module


class OperationRecorder(TorchDispatchMode):
    """Count operations, and record the size of the largest result in numbers."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        self.count[function.overloadpacket.__name__] += 1
        parts = result if isinstance(result, tuple | list) else [result]
        for part in parts:
            if isinstance(part, torch.Tensor):
                self.largest = max(self.largest, part.numel())
        return result


# The number of logits at a time


@each_number_of_rows
def test_loss_is_mean_over_targets(model, batch, rows):
    inputs, targets = batch
    logits = stock_copy(model)(inputs).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    module = make_loss(model, rows)

    loss = module(inputs, targets)
    with torch.no_grad():
        evaluation_loss = module(inputs, targets)

    assert loss.item() == pytest.approx(expected, abs=1e-5)
    assert evaluation_loss.item() == pytest.approx(expected, abs=1e-5)


@each_number_of_rows
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_transformers_loss(kind, rows):
    model = randomize_weights(build_small_model(**KINDS[kind])).train()
    stock_model = stock_copy(model).train()
    ids = random_ids(3, 16)

    loss = make_loss(model, rows)(ids[:, :-1], ids[:, 1:])
    gradients = backward(loss, model)

    # Transformers shifts the labels itself.
    expected = stock_model(ids, labels=ids).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_close(gradients, backward(expected, stock_model), rtol=1e-4, atol=1e-6)


def test_loss_is_finite_with_large_logits(model, batch):
    """The exponential of a logit above 88 would be infinite in fp32."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e4)
    inputs, targets = batch
    logits = model(inputs).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten())

    loss = make_loss(model, FEW_ROWS)(*batch)
    gradients = backward(loss, model)

    assert logits.max() > 88
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_default_number_of_rows_gives_same_loss(model, batch):
    expected = make_loss(model, ALL_ROWS)(*batch)

    assert NextTokenLoss(model)(*batch).item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize(
    ("vocab_size", "rows"),
    [(2**14, 256), (2**14 + 64, 272)],
    ids=["logits fit cache", "logits exceed cache"],
)
def test_cpu_splits_logits_that_fit_cache(vocab_size, rows):
    model = build_small_model(vocab_size=vocab_size, n_head=4, n_embd=8, n_layer=1)
    inputs = random_ids(17, 16)  # 272 rows

    with OperationRecorder() as recorder:
        loss_module(model, keys.Loss(), 0)(inputs, inputs)

    assert recorder.largest == rows * vocab_size


def scaled_gradients(module: NextTokenLoss, batch, dtype=None) -> dict[str, torch.Tensor]:
    """Return the gradients of 1024 times the loss, computed with autocast to ``dtype``."""
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = module(*batch)
    return backward(loss * 2.0**10, module.model)


@pytest.mark.parametrize(
    ("dtype", "terms"),
    [(torch.bfloat16, {}), (torch.float16, BOTH_TERMS)],
    ids=["bf16", "fp16"],
)
def test_split_loss_is_precise_in_half_precision(model, batch, dtype, terms):
    """Both losses differ from fp32 by rounding. The sums of the split one are in fp32."""
    exact = scaled_gradients(make_loss(model, ALL_ROWS, **terms), batch)
    whole = scaled_gradients(make_loss(model, ALL_ROWS, **terms), batch, dtype)

    split = scaled_gradients(make_loss(model, FEW_ROWS, **terms), batch, dtype)

    for name in ("transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"):
        whole_error = (whole[name] - exact[name]).norm() / exact[name].norm()
        split_error = (split[name] - exact[name]).norm() / exact[name].norm()
        assert split_error < 1.2 * whole_error + 1e-4, name
        assert whole_error < 0.05, name


@pytest.mark.parametrize(
    ("rows", "largest"),
    [(ALL_ROWS, 48 * 512), (FEW_ROWS, 512 * 32)],
    ids=["all logits", "output matrix"],
)
def test_split_loss_never_computes_all_logits(batch, rows, largest):
    model = build_small_model(vocab_size=512)
    module = make_loss(model, rows, **BOTH_TERMS)

    with OperationRecorder() as recorder:
        module(*batch).backward()

    assert recorder.largest == largest


# The compiled loss


def inputs_of(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield all nodes on which a node depends."""
    for source in node.all_input_nodes:
        yield source
        yield from inputs_of(source)


def logits_nodes(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return the nodes that compute logits: 16 rows of a vocabulary of 64."""
    products = [node for node in graph.nodes if node.target == torch.ops.aten.mm.default]
    return [node for node in products if node.meta["val"].shape == (16, 64)]


def test_compiled_parts_of_logits_depend_on_each_other():
    """Inductor moves independent products to the front, so that all logits exist together.

    Each part depends on the one before it, whose memory can then be freed.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(48, 32, generator=generator, requires_grad=True)
    head = torch.randn(64, 32, generator=generator, requires_grad=True)
    targets = random_ids(48)
    graphs = []

    def record_graph(graph, example_inputs):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    def loss(hidden, head):
        objective, _ = _ChunkedLoss.apply(hidden, head, targets, 16, 0.1, 1e-2)
        return objective

    expected = torch.autograd.grad(loss(hidden, head), (hidden, head))
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=aot_autograd(fw_compiler=record_graph), fullgraph=True)

    gradients = torch.autograd.grad(compiled(hidden, head), (hidden, head))

    assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
    parts = logits_nodes(graphs[0])
    assert len(parts) == 3
    for earlier, later in itertools.pairwise(parts):
        assert earlier in inputs_of(later)


# Label smoothing and z-loss


def loss_by_formula(logits: torch.Tensor, targets: torch.Tensor, terms: dict) -> torch.Tensor:
    """Compute the loss from all logits by its definition."""
    logits = logits.flatten(0, 1)
    smoothing = terms.get("label_smoothing", 0.0)
    cross_entropy = F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing)
    z = logits.exp().sum(-1).log()
    return cross_entropy + terms.get("z_loss", 0.0) * z.square().mean()


@each_number_of_rows
@pytest.mark.parametrize(
    ("kind", "terms"),
    [*(("gpt2", terms) for terms in TERMS), ("untied", BOTH_TERMS)],
    ids=[*TERM_NAMES, "untied"],
)
def test_terms_of_loss_equal_their_formulas(batch, kind, terms, rows):
    # With random weights the logits vary so much that each term matters.
    model = randomize_weights(build_small_model(**KINDS[kind])).train()
    inputs, targets = batch

    loss = make_loss(model, rows, **terms)(inputs, targets)
    gradients = backward(loss, model)

    expected = loss_by_formula(model(inputs).logits, targets, terms)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_close(gradients, backward(expected, model), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("terms", TERMS, ids=TERM_NAMES)
def test_loss_of_all_logits_on_gpu_equals_formula(batch, terms):
    model = randomize_weights(build_small_model()).train()
    inputs, targets = batch
    logits = model(inputs).logits

    losses = NextTokenLoss(model, **terms)._losses_of_logits(
        logits.flatten(0, 1), targets.flatten()
    )
    gradients = backward(losses.objective, model)

    expected = loss_by_formula(model(inputs).logits, targets, terms)
    assert losses.objective.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_close(gradients, backward(expected, model), rtol=1e-4, atol=1e-6)


@each_number_of_rows
@pytest.mark.parametrize("terms", TERMS, ids=TERM_NAMES)
def test_cross_entropy_is_returned_with_objective(batch, terms, rows):
    model = randomize_weights(build_small_model()).train()
    module = make_loss(model, rows, **terms)
    objective = module(*batch)
    with torch.no_grad():
        cross_entropy = module(*batch)

    with OperationRecorder() as recorder:
        losses = module(*batch, with_cross_entropy=True)

    # one exponential per logit
    assert recorder.count["exp_"] == math.ceil(48 / rows)
    assert recorder.count["logsumexp"] == 0
    assert recorder.count["_log_softmax"] == 0
    assert losses.cross_entropy.item() == pytest.approx(cross_entropy.item(), abs=1e-6)
    is_plain = not terms
    assert (losses.objective is losses.cross_entropy) == is_plain
    assert losses.cross_entropy.requires_grad == is_plain
    assert torch.equal(losses.objective, objective)
    expected = backward(objective, model)
    assert_close(backward(losses.objective, model), expected, rtol=0, atol=0)


# The loss of a recipe


@pytest.fixture
def document_batch(batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch with the separator 5 in the middle of each row."""
    inputs, targets = batch
    inputs[:, 7] = 5
    return inputs, targets


def test_recipe_loss_has_its_terms_in_training_only(model, document_batch):
    settings = keys.Loss(document_mask=True, **BOTH_TERMS)
    context = functools.partial(attention.within_documents, separator=5)
    expected = NextTokenLoss(model, context=context, **BOTH_TERMS)(*document_batch)
    with torch.no_grad():
        expected_in_evaluation = NextTokenLoss(model, context=context)(*document_batch)
    module = loss_module(model, settings, 5)

    loss = module(*document_batch)
    with torch.no_grad():
        evaluation_loss = module(*document_batch)

    assert torch.equal(loss, expected)
    assert torch.equal(evaluation_loss, expected_in_evaluation)


def test_recipe_loss_is_plain_by_default(model, document_batch):
    settings = keys.Loss(document_mask=True, **BOTH_TERMS)
    other_loss = loss_module(model, settings, 5)(*document_batch)

    loss = loss_module(model, keys.Loss(), 5)(*document_batch)

    assert torch.equal(loss, NextTokenLoss(model)(*document_batch))
    assert not torch.equal(loss, other_loss)
