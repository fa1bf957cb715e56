from __future__ import annotations

import numpy as np
import pytest

from lab.evaluate.held_out import BLOCK_TOKENS
from lab.evaluate.intervals import of_ratio, of_share, pair_sums, shown


@pytest.mark.parametrize(("right", "questions", "interval"), [
    (0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)),  # 1 / (1 + n / z^2), and 1 minus that
    (81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)),  # Newcombe 1998, table I
    (0, 20, (0.0, 0.1611)), (1, 29, (0.0061, 0.1718)),
])
def test_wilsons_interval_is_the_published_one(right: int, questions: int,
                                               interval: tuple[float, float]) -> None:
    assert of_share(right, questions) == pytest.approx(interval, abs=6e-5)


def test_a_short_last_sequence_counts_by_its_tokens() -> None:
    losses, tokens = np.array([24.0, 30.0, 36.0, 6.0]), np.array([8, 8, 8, 2])
    low, high = of_ratio(pair_sums(losses, tokens))
    ratio = 96 / 26
    deviations = losses - ratio * tokens
    half = 3.182 * np.sqrt(4 / 3 * (deviations**2).sum()) / 26
    assert (low, high) == pytest.approx((ratio - half, ratio + half))
    halves = pair_sums(losses[:1], tokens[:1]) + pair_sums(losses[1:], tokens[1:])
    assert of_ratio(halves) == pytest.approx((low, high))


def test_the_interval_covers_the_true_mean_in_95_of_100_samples() -> None:
    random = np.random.default_rng(0)
    for size in (5, 60):
        samples = random.normal(3.0, 1.0, size=(2000, size))
        intervals = [of_ratio(pair_sums(sample, np.ones(size))) for sample in samples]
        assert np.mean([low < 3.0 < high for low, high in intervals]) == pytest.approx(0.95,
                                                                                        abs=0.015)


def test_blocks_cover_the_true_mean_of_losses_that_resemble_their_neighbours() -> None:
    """Losses of 1,024-token sequences, each with half of the deviation of the one before."""
    random = np.random.default_rng(0)
    samples, steps = np.zeros((1000, 640)), random.normal(size=(1000, 640))
    samples[:, 0] = steps[:, 0] / np.sqrt(1 - 0.5**2)
    for place in range(1, 640):
        samples[:, place] = 0.5 * samples[:, place - 1] + steps[:, place]
    starts, ones, covered = np.arange(640) * 1024, np.ones(640), {}
    for block in (1024, BLOCK_TOKENS):
        intervals = []
        for sample in samples:
            sums = np.zeros((640 * 1024 // block, 2))
            np.add.at(sums, starts // block, np.stack([sample, ones], axis=1))
            intervals.append(of_ratio(pair_sums(*sums.T)))
        covered[block] = np.mean([low < 0 < high for low, high in intervals])
    assert covered[1024] < 0.80 and covered[BLOCK_TOKENS] == pytest.approx(0.945, abs=0.02)


def test_without_a_spread_to_measure_there_is_no_interval() -> None:
    assert of_ratio(pair_sums(np.array([3.0]), np.array([8]))) is None
    assert of_ratio(pair_sums(np.array([3.0, 4.0]), np.array([0, 0]))) is None
    assert of_ratio(pair_sums(np.full(3, 0.1), np.full(3, 7))) == pytest.approx((0.1 / 7, 0.1 / 7))
    for wrong in (np.nan, np.inf):
        assert of_ratio(pair_sums(np.array([wrong, 1.0]), np.ones(2))) is None
    assert shown(1.23456, None, decimals=3) == "1.235"
    assert shown(1.23456, (1.0, 2.0), decimals=3) == "1.235 [1.000, 2.000]"
