"""The orthogonal matrix nearest to a given one, approximately, by matrix products only.

Shapes: n matrices in a batch, of r rows and c columns.
"""

import torch
from torch import Tensor

# Coefficients (a, b, c) of the polynomials a s + b s^3 + c s^5 that are applied one after the other
# to the singular values s: the first ones raise small values, the last one settles near 1.
POLYNOMIALS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
SAFETY = 1.02  # the polynomials were found for singular values below 1
EPSILON = 1e-7


def orthogonalise(matrices: Tensor) -> Tensor:
    """Replace all singular values of each matrix by about 1, between 0.85 and 1.15.

    Only those below a thousandth of the matrix's Frobenius norm stay smaller. A matrix of zeros
    stays zero. `matrices` are (n, r, c) with r at most c, which makes the products smallest, and of
    the dtype to compute in (bfloat16 is enough), as is what is returned.

    Source: Jordan et al. 2024, "Muon", for the use of a Newton-Schulz iteration; Amsel et al. 2025,
    "The Polar Express", section 3 and algorithm 1, for the polynomials.
    """
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) * SAFETY + EPSILON)
    for a, b, c in POLYNOMIALS:
        gram = x @ x.mT  # (n, r, r)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # (n, r, r)
        x = torch.baddbmm(x, polynomial, x, beta=a)  # (n, r, c)
    return x
