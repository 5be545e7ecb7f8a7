"""The statistics by hand on made-up runs, and a real, interrupted and resumed reproduction of the smallest size."""
import json

import pytest
from test_plot import make_run

import plot
import reproduce


def test_tables_by_hand(tmp_path):
    for seed, gain in ((1, 0.1), (2, 0.2), (3, 0.3)):
        make_run(tmp_path / f"grpo-{seed}", "grpo", seed)                  # pass@1 is 0.5 after the last step
        make_run(tmp_path / f"sus-{seed}", "sus", seed, gain)
    runs = plot.find_runs([str(tmp_path)])
    assert reproduce.values(runs, "sus", "pass@1") == pytest.approx([0.6, 0.7, 0.8])
    metrics = {"pass@1": "pass@1", "strategy_entropy": "entropy"}
    table = "\n".join(reproduce.results_table(runs, ["sus", "grpo"], metrics))
    assert "| base model | 0.0 % | 2.00 |" in table
    assert "| sus | 70.0 ± 24.8 % | 1.00 ± 0.00 |" in table            # 4.303 * 0.1 / sqrt(3) = 0.248
    assert "| sus over grpo | +40 % (-10 to +90) | +0 % (+0 to +0) |" in reproduce.difference_table(runs, [("sus", "grpo")], metrics)
