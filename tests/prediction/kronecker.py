"""Laplace posteriors with Kronecker products of their own choosing, and their covariances as dense matrices."""

import torch
from torch.func import functional_call, jacrev

from bayesify import Laplace, convert
from bayesify._core.trees import call

__all__ = ["dense", "exact_covariance", "kronecker"]


def kronecker(network, likelihood="classification", seed=2, **selection):
    """Return a posterior with products whose bases and eigenvalues are random, as if data had been seen."""
    generator = torch.Generator().manual_seed(seed)
    method = Laplace(structure="kronecker", prior_precision=3.0)
    posterior = convert(network.double().eval(), method, likelihood=likelihood, **selection)
    with torch.no_grad():
        for tree in (posterior.law.left, posterior.law.right):
            for tensor in tree.as_dict().values():
                tensor.copy_(torch.linalg.qr(torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator))[0])
        for tree in (posterior.law.left_values, posterior.law.right_values, posterior.law.curvature):
            for tensor in tree.as_dict().values():
                tensor.copy_(4 * torch.rand(tensor.shape, dtype=tensor.dtype, generator=generator))
    posterior.law.complete.fill_(True)
    return posterior


def dense(posterior, weight):
    """Return (B (x) A + delta I)^-1 of a layer for each group, over (W, b) row by row."""
    found = []
    parts = (posterior.law.left, posterior.law.right, posterior.law.left_values, posterior.law.right_values)
    for left, right, beta, alpha in zip(*(part.as_dict()[weight] for part in parts), strict=True):
        product = torch.kron(left @ beta.diag() @ left.T, right @ alpha.diag() @ right.T)
        found.append(torch.linalg.inv(product + 3.0 * torch.eye(len(product), dtype=product.dtype)))
    return torch.stack(found)


def exact_covariance(posterior, inputs):
    """Return outputs (B, K) and their covariance J S J', (B, K, K), with the whole Jacobian."""
    weights = {name: p.detach() for name, p in posterior.network.named_parameters() if name in posterior.law.names}

    def run(weights):
        output = call(lambda *a, **k: functional_call(posterior.network, weights, a, k), inputs)
        return posterior.read(output).flatten(1)

    jacobian = jacrev(run)(weights)
    with torch.no_grad():
        outputs = run(weights)
    total = 0
    for name, block in posterior.law.blocks.items():
        shape = (*outputs.shape, block.groups, block.rows, -1)
        columns = [jacobian[part].reshape(shape) for part in (name, block.bias) if part is not None]
        j = torch.cat(columns, -1).flatten(3)
        total = total + torch.einsum("bigp,gpq,bjgq->bij", j, dense(posterior, name), j)
    for name, curvature in posterior.law.curvature.as_dict().items():
        j = jacobian[name].reshape(*outputs.shape, -1)
        total = total + torch.einsum("bip,p,bjp->bij", j, 1 / (curvature.flatten() + 3.0), j)
    return outputs, total
