"""Curvature by definition: a Jacobian of every output of every example, and the Hessian of -ln p in the outputs."""

import torch
from torch import Tensor


def output_hessians(likelihood, output: Tensor, target: Tensor) -> Tensor:
    """Return the Hessian of -ln p in the outputs of each example, (B, F, F), by differentiating twice."""
    found = []
    for row in range(len(output)):
        one, label = output[row : row + 1].detach(), target[row : row + 1]
        hessian = torch.autograd.functional.hessian(lambda o, y=label: -likelihood.log_prob(o, y).sum(), one)
        found.append(hessian.reshape(one.numel(), one.numel()))
    return torch.stack(found)


def jacobian(run, x: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Return d output / d parameter of one example for each parameter, (F, *shape), one output at a time."""
    output = run(x).reshape(-1)
    rows = []
    for value in output:
        grads = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)])
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def diagonal_ggn(run, x: Tensor, parameters: dict[str, Tensor], hessians: Tensor) -> dict[str, Tensor]:
    """Return the diagonal of sum_n J_n' Lambda_n J_n, parameter by parameter."""
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for row in range(len(x)):
        found = jacobian(run, x[row : row + 1], list(parameters.values()))
        for name, j in zip(parameters, found, strict=True):
            sums[name] += torch.einsum("c...,cd,d...->...", j, hessians[row], j)
    return sums


def full_ggn(run, x: Tensor, parameters: list[Tensor], hessians: Tensor) -> Tensor:
    """Return sum_n J_n' Lambda_n J_n of all parameters, flattened one after the other, (P, P)."""
    total = 0
    for row in range(len(x)):
        found = torch.cat([j.flatten(1) for j in jacobian(run, x[row : row + 1], parameters)], 1)
        total = total + found.T @ hessians[row] @ found
    return total
