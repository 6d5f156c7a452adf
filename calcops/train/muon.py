"""The optimizer Muon in float32.

torch.optim.Muon is the same in bfloat16. That is slow on CPUs without bfloat16 products: small
matrices take 2.5 times as long. Source of the method: K. Jordan et al.,
https://kellerjordan.github.io/posts/muon.
"""

import torch

# The polynomial a x + b x^3 + c x^5. Its iteration moves singular values from 0 to 1 close to 1.
kCoefficients = 3.4445, -4.7750, 2.0315
kIterations = 5
kMomentum = 0.95
kGrid = 2.0**-20  # of entries of a gradient, in units of its norm


def orthogonal(matrix):
    """Return a matrix with the singular vectors of `matrix`, and singular values near 1.

    A stack of matrices [count, rows, columns] gives a stack. It computes in float32. The result has
    the type of `matrix`.

    Entries are rounded to a grid first. Several processes sum a gradient in another order than one
    process does, so that it differs by rounding errors of float64. Conversion to float32 enlarges
    such an error to 1e-7 of an entry where the entry lies between two numbers of float32. Then the
    losses of several processes and of one differ ever more. The grid is coarser, at least for small
    entries, so that this hardly ever happens.
    """
    a, b, c = kCoefficients
    is_stack = matrix.dim() == 3
    multiply_add = torch.baddbmm if is_stack else torch.addmm
    size = matrix.norm(dim=(1, 2), keepdim=True) if is_stack else matrix.norm()
    rows, columns = matrix.shape[-2:]
    X = matrix / size.clamp(min=1e-7)
    X = ((X / kGrid).round() * kGrid).float()
    if rows > columns:
        X = X.mT
    for _ in range(kIterations):
        square = X @ X.mT
        polynomial = multiply_add(square, square, square, beta=b, alpha=c)
        X = multiply_add(X, polynomial, X, beta=a)
    if rows > columns:
        X = X.mT
    return X.to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Steps of one length along all singular vectors of a gradient, with Nesterov's momentum.

    A matrix whose gradient is exactly zero keeps its place and its momentum: no frame of the batch
    has the element whose net it is.

    Args:
        parameters: matrices, or stacks of matrices [count, rows, columns].
        lr: the rate.
        decay: the part of itself that a matrix loses in a step, in units of the rate. It bounds the
            singular values to some 1/decay.
    """

    def __init__(self, parameters, lr=1e-3, decay=0.0):
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self):
        """Take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"]
                gradient = parameter.grad
                moves = gradient.flatten(-2).any(-1)[..., None, None].to(gradient)
                momentum.lerp_(gradient, (1 - kMomentum) * moves)
                rows, columns = parameter.shape[-2:]
                length = group["lr"] * max(1, rows / columns) ** 0.5
                direction = orthogonal(gradient.lerp(momentum, kMomentum))
                parameter.mul_(1 - group["lr"] * group["decay"] * moves)
                parameter.sub_(length * moves * direction)
