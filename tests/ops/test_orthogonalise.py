from __future__ import annotations

import pytest
import torch

from ops.orthogonalise import orthogonalise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_singular_values_become_about_one_and_vectors_stay(
    dtype: torch.dtype, size: float
) -> None:
    torch.manual_seed(0)
    matrices = size * torch.randn(3, 24, 96)
    result = orthogonalise(matrices.to(dtype))
    assert result.dtype == dtype and result.shape == matrices.shape
    singular_values = torch.linalg.svdvals(result.float())
    assert singular_values.min() > 0.85 and singular_values.max() < 1.15
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(
        (u @ v).flatten(1), result.float().flatten(1)).min() > 0.99


def test_small_singular_values_are_raised_and_none_overshoots() -> None:
    values = torch.logspace(0, -5, 40)
    result = torch.linalg.svdvals(orthogonalise(torch.diag(values)[None]))[0]
    assert result.max() < 1.15
    assert (result > 0.7).sum() == (values > 1e-3 * values.norm()).sum()


def test_each_matrix_is_treated_by_itself() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(4, 8, 16) * torch.tensor([1e-3, 1.0, 10.0, 1e3])[:, None, None]
    one_by_one = torch.cat([orthogonalise(matrix[None]) for matrix in matrices])
    torch.testing.assert_close(orthogonalise(matrices), one_by_one)


def test_a_matrix_of_zeros_stays() -> None:
    assert not orthogonalise(torch.zeros(1, 4, 8)).any()
