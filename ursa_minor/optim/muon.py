"""Muon, which orthogonalizes the momentum of each hidden matrix, and uses AdamW for other weights.

Sources:

- Muon: K. Jordan et al., https://kellerjordan.github.io/posts/muon/
- Step size, which matches AdamW's: Liu et al., https://arxiv.org/abs/2502.16982
- Ablation of the choices below: benchmarks/results/muon-ablation-cpu-2026-11-22.json
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from ursa_minor.model.architectures import ARCHITECTURES, Architecture
from ursa_minor.optim import adamw

# Jordan's coefficients of the Newton-Schulz polynomial. They maximize its slope at 0, so that small
# singular values grow quickly. Afterwards, all are between about 0.7 and 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
# Elements of the matrices that are updated together: enough to keep a GPU busy, with limited
# memory.
MOST_ELEMENTS = 2**26


def groups(model: nn.Module, architecture: Architecture, weight_decay: float) -> list[dict]:
    """Return the parameter groups of ``Muon``: hidden matrices by shape, then those of AdamW.

    Args:
        model: the model to train.
        architecture: its definition.
        weight_decay: weight decay of matrices and embeddings.
    """
    # Keys are (parts, rows, columns), as in the groups below.
    hidden: dict[tuple[int, int, int], list[nn.Parameter]] = {}
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if adamw.is_hidden_matrix(name, parameter, architecture):
            rows, columns = parameter.shape
            key = (_fused_parts(name, architecture), rows, columns)
            hidden.setdefault(key, []).append(parameter)
        else:
            others.append((name, parameter))
    muon_groups = []
    for (parts, rows, columns), parameters in hidden.items():
        muon_groups.append(
            {
                "params": parameters,
                "weight_decay": weight_decay,
                "parts": parts,
                "scale": step_scale(rows, columns // parts),
            }
        )
    return [*muon_groups, *adamw.groups(others, weight_decay)]


def _fused_parts(name: str, architecture: Architecture) -> int:
    """Return the number of projections side by side in a matrix, such as query, key and value."""
    for suffix, parts in architecture.fused.items():
        if name.endswith(suffix):
            return parts
    return 1


def step_scale(rows: int, columns: int) -> float:
    """Return the factor that scales an orthogonal matrix to the size of AdamW's steps.

    Their root mean square is about 0.2.
    """
    return 0.2 * math.sqrt(max(rows, columns))


class Muon(torch.optim.AdamW):
    """Fused AdamW that updates the groups with a positive ``parts`` by Muon instead.

    One optimizer contains both methods, so that there is one state to save, and one step to apply
    or skip.

    Args:
        groups: parameter groups. A group for Muon contains matrices of one shape, ``parts``, the
            number of projections side by side in their columns, and ``scale``, a factor of the
            learning rate.
        momentum: Nesterov momentum of Muon.
        settings: further arguments of ``torch.optim.AdamW``.
    """

    def __init__(self, groups: list[dict], *, momentum: float, **settings):
        defaults = {"parts": 0, "scale": 1.0, "momentum": momentum}
        super().__init__([defaults | group for group in groups], fused=True, **settings)

    def __setstate__(self, state: dict) -> None:
        # AdamW's method cannot be used, because it expects its moments for every parameter.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update every parameter that has a gradient.

        The gradients of Muon's parameters are set to None.
        """
        for group in self.param_groups:
            if not group["parts"]:
                continue
            for batch in _batches(group["params"]):
                self._update(batch, group)
                for parameter in batch:
                    parameter.grad = None
        # AdamW skips parameters without a gradient, and so those of Muon.
        super().step(closure)

    def _update(self, parameters: list[nn.Parameter], group: dict) -> None:
        """Update matrices of one shape."""
        momentum = group["momentum"]
        updates = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            average = state["momentum_buffer"]
            average.lerp_(parameter.grad, 1 - momentum)
            update = parameter.grad.lerp(average, momentum)
            if isinstance(update, DTensor):
                update = update.full_tensor()
            updates.append(update)

        # Projections that share a matrix are orthogonalized separately.
        parts = group["parts"]
        stack = torch.stack(updates)  # (matrices, rows, columns)
        if parts > 1:
            # (parts * matrices, rows, columns / parts)
            stack = torch.cat(stack.chunk(parts, dim=-1))
        stack = orthogonalize(stack.to(_product_dtype(stack.device)))
        if parts > 1:
            stack = torch.cat(stack.chunk(parts), dim=-1)

        decay = 1 - group["lr"] * group["weight_decay"]
        step_size = group["lr"] * group["scale"]
        for parameter, update in zip(parameters, stack, strict=True):
            # Each process has computed the full matrix and applies its own rows.
            if isinstance(parameter, DTensor):
                full_update = DTensor.from_local(
                    update, parameter.device_mesh, [Replicate()], run_check=False
                )
                update = full_update.redistribute(placements=parameter.placements)
            parameter.mul_(decay)
            parameter.add_(update, alpha=-step_size)


def _batches(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters that have gradients, in lists of at most ``MOST_ELEMENTS`` elements.

    A parameter with more elements is the only one in its list.
    """
    batch: list[nn.Parameter] = []
    elements = 0
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if batch and elements + parameter.numel() > MOST_ELEMENTS:
            yield batch
            batch = []
            elements = 0
        batch.append(parameter)
        elements += parameter.numel()
    if batch:
        yield batch


def _product_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of the matrix products in ``orthogonalize``.

    On a GPU, half precision is accurate enough, and it uses the tensor cores. GPUs before Ampere
    have no bf16, which torch would emulate 20 times slower. On a CPU, fp32 is faster and more
    accurate.
    """
    if device.type != "cuda":
        return torch.float32
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float16


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices with about the same singular vectors, but singular values near 1.

    This is the Newton-Schulz iteration with Jordan's quintic polynomial,
    x <- a x + (b (x x^T) + c (x x^T)^2) x. The products x x^T have the size of the shorter side.

    Args:
        matrices: (n, rows, columns).
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    norm = torch.linalg.matrix_norm(x, keepdim=True, dtype=torch.float32).clamp(min=1e-7)
    x = x / norm.to(x.dtype)
    a, b, c = QUINTIC
    for _ in range(ROUNDS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


class TrainerMuon:
    """Factory of ``Muon`` for the Trainer of Transformers.

    Usage: ``Trainer(..., optimizer_cls_and_kwargs=(TrainerMuon, {"lr": 0.01}))``

    The Trainer creates an instance without arguments and calls it with its model and these keyword
    arguments (``transformers.trainer_optimizer.is_optimizer_factory``).
    """

    def __call__(
        self, model: nn.Module, *, lr: float, weight_decay: float = 0.1, **settings
    ) -> Muon:
        """Return the optimizer of a model.

        Args:
            model: a model of Transformers.
            lr: learning rate.
            weight_decay: weight decay of matrices and embeddings.
            settings: momentum of Muon (default: 0.95), and AdamW's betas (default: (0.9, 0.95)) and
                eps (default: 1e-8).

        Raises:
            ValueError: the model is neither GPT-2 nor Llama.
        """
        model_type = model.config.model_type
        if model_type not in ARCHITECTURES:
            raise ValueError(
                f"model_type = {model_type}: Muon supports models of type "
                f"{' and '.join(ARCHITECTURES)} only"
            )
        defaults: dict[str, Any] = {"momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-8}
        parameter_groups = groups(model, ARCHITECTURES[model_type], weight_decay)
        return Muon(parameter_groups, lr=lr, **defaults | settings)
