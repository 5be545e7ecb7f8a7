"""Comparisons by hand: temperatures, levels, pairs, Student's t, Holm."""
import json
import math
import random
from pathlib import Path

import pytest

from experiments import compare
from support.files import read_lines


def lines(name, seed, *points, split="test", task="countdown"):
    """(temperature, pass@1, coverage) -> lines; pass@5 and pass@16 are made of them."""
    return [{"name": name, "seed": seed, "split": split, "temperature": t, "data": task,
             "base": f"cache-{seed}", "problems": 400,
             "pass@1": p, "pass@5": min(p + 0.1, 1), "pass@16": c, "coverage": c}
            for t, p, c in points]


CURVE = lines("sus", 1, (0.3, 0.9, 0.4), (0.6, 0.8, 0.5), (1.0, 0.6, 0.7))


def cells(table, name):
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_intervals_by_hand():
    mean, half = compare.mean_and_half([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.303 / math.sqrt(3))
    assert compare.mean_and_half([5.0])[0] == 5.0
    assert math.isnan(compare.mean_and_half([5.0])[1])
    _, half = compare.mean_and_half([0.0, 1.0] * 20)  # Student's t of 39 degrees is 2.023
    assert half == pytest.approx(2.023 * math.sqrt(0.25 * 40 / 39) / math.sqrt(40), rel=1e-3)


def test_p_values_are_those_of_a_paired_t_test():
    stats = pytest.importorskip("scipy.stats")
    for values in ([0.1, 0.2, 0.15, 0.3, 0.05], [1.0, -1.0, 0.5], [0.1, 0.11, 0.12, 0.1, 0.105]):
        expected = stats.ttest_1samp(values, 0).pvalue
        assert compare.p_value(values) == pytest.approx(expected, rel=0.01, abs=1e-6)
    assert compare.p_value([-1.0, 1.0, 0.0]) == pytest.approx(1.0)
    assert compare.p_value([0.5, 0.5]) == 0.0 and compare.p_value([0.0, 0.0]) == 1.0


def test_p_values_by_the_table_of_student():
    """t = 2.776 has p = 0.05 with four degrees of freedom, by any printed table."""
    values = [-2.0, -1.0, 0.0, 1.0, 2.0]  # standard error 0.7071
    assert compare.p_value([value + 2.776 * 0.70711 for value in values]) == pytest.approx(
        0.05, rel=0.01)


@pytest.mark.parametrize("given, expected", [
    ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),  # 3 * 0.01, 2 * 0.03, and no less than that
    ([0.5, 0.9], [1.0, 1.0]), ([0.02], [0.02]), ([], [])])
def test_holm_by_hand(given, expected):
    assert compare.holm(given) == pytest.approx(expected)


def test_each_measure_has_its_own_best_temperature():
    assert compare.choose_temperature({1: CURVE}, "pass@1") == 0.3
    assert compare.choose_temperature({1: CURVE}, "coverage") == 1.0
    other = lines("sus", 2, (0.3, 0.1, 0.4), (0.6, 0.8, 0.5), (1.0, 0.6, 0.7))
    assert compare.choose_temperature({1: CURVE, 2: other}, "pass@1") == 0.6  # of the mean
    equal = lines("sus", 1, (0.3, 0.5, 0.1), (1.0, 0.5, 0.1))
    assert compare.choose_temperature({1: equal}, "pass@1") == 0.3


@pytest.mark.parametrize("accuracy, place, coverage", [
    (0.9, 0, 0.4), (0.85, 0.5, 0.45), (0.7, 1.5, 0.6), (0.6, 2, 0.7), (0.2, 2, 0.7)])
def test_places_are_interpolated_along_the_temperature(accuracy, place, coverage):
    found = compare.choose_place(CURVE, "coverage", "pass@1", accuracy)
    assert found == pytest.approx(place)
    assert compare.value_at_place(CURVE, "coverage", found) == pytest.approx(coverage)


def test_a_curve_that_turns_back_gives_its_best_place():
    """pass@16 rises and falls with the temperature: of two places at a level the better counts."""
    curve = lines("sus", 1, (0.3, 0.5, 0.6), (0.6, 0.4, 0.8), (1.0, 0.2, 0.6))
    assert compare.choose_place(curve, "pass@1", "pass@16", 0.7) == pytest.approx(0.5)
    assert compare.choose_place(curve, "pass@1", "pass@16", 0.8) == pytest.approx(1.0)
    assert compare.value_at_place(curve, "pass@1", 0.5) == pytest.approx(0.45)


def test_differences_are_paired_and_relative():
    ours, theirs = {1: 0.6, 2: 0.9}, {2: 0.8, 1: 0.4}
    assert compare.differences(ours, theirs) == pytest.approx([0.2 / 0.6, 0.1 / 0.6])


def test_matched_differences_by_hand():
    """On validation the lesser best pass@1 is 0.8, so both are compared at a pass@1 of 0.76."""
    theirs = lines("grpo", 1, (0.3, 0.8, 0.2), (0.6, 0.6, 0.4), (1.0, 0.4, 0.6))
    found = compare.matched_differences({1: CURVE}, {1: theirs}, [{1: CURVE}, {1: theirs}],
                                        "coverage", "pass@1")
    ours_there = 0.5 + 0.2 * 0.04 / 0.2
    theirs_there = 0.2 + 0.2 * 0.04 / 0.2
    assert found == pytest.approx([(ours_there - theirs_there) / theirs_there])
    # On test problems the places stay, whatever would look better there.
    test = lines("sus", 1, (0.3, 0.9, 9.0), (0.6, 0.8, 0.3), (1.0, 0.6, 0.7))
    found = compare.matched_differences({1: test}, {1: theirs}, [{1: CURVE}, {1: theirs}],
                                        "coverage", "pass@1")
    ours_there = 0.3 + 0.4 * 0.04 / 0.2
    assert found == pytest.approx([(ours_there - theirs_there) / theirs_there])


def test_noise_alone_gives_no_difference():
    """Two settings of equal truth, one with many places to choose from: 5 % of p-values below 0.05.

    Chosen on the numbers that are compared, it would be 40 %.
    """
    rng = random.Random(0)

    def noisy(points):
        return {seed: lines("x", seed, *((t, p + rng.gauss(0, 0.01), 0.5 + rng.gauss(0, 0.01))
                                         for t, p in points)) for seed in range(5)}
    flat, steep = [(t, 0.8) for t in range(5)], [(t, 0.8 - 0.2 * t) for t in range(5)]
    low = 0
    for _ in range(100):
        ours, theirs, chosen = noisy(flat), noisy(steep), [noisy(flat), noisy(steep)]
        values = compare.matched_differences(ours, theirs, chosen, "coverage", "pass@1")
        low += compare.p_value(values) < 0.05
    assert low <= 14


@pytest.mark.parametrize("change, message", [
    (lambda found: found + found[:1], "two runs of sus have seed 1"),
    (lambda found: found[1:], "different temperatures"),
    (lambda found: [found[0] | {"data": "other"}] + found[1:], "different tasks"),
    (lambda found: [found[0] | {"problems": 7}] + found[1:], "different numbers of problems"),
    (lambda found: [found[0] | {"base": "x"}] + found[1:], "different base models for one seed"),
    (lambda found: [{"name": "x"}], "damaged"), (lambda found: [], "nothing to compare"),
    (lambda found: [line | {"pass@1": None} for line in found], "damaged"),
    (lambda found: found[:-1] + [found[-1] | {"coverage": None}], "see the coverage of name ss"),
    (lambda found: found[:-1] + [found[-1] | {"pass@5": math.nan}], "see the pass@5 of name ss"),
    (lambda found: [line | {"split": "Test"} for line in found], "see the split"),
    (lambda found: [line | {"temperature": "hot"} for line in found[:1]] + found[1:], "damaged")])
def test_what_cannot_be_compared_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        compare.make_tables(change(world()))


def world():
    """SuS 0.6 and GRPO 0.4 on test problems, each at what validation calls its best."""
    found = []
    for seed in (1, 2):
        for name, level in (("sus", 0.6), ("grpo-kl-0.1", 0.4), ("grpo-kl-0", 0.3), ("passk", 0.5),
                            ("ss", 0.2)):
            found += lines(name, seed, (0.3, level, 0.5), (1.0, 0.1, 0.7), split="validation")
            found += lines(name, seed, (0.3, level + 0.01 * seed, 0.5), (1.0, 0.99, 0.7))
    return found


def test_tables_take_temperatures_from_validation():
    text = compare.make_tables(world())
    assert cells(text, "sus")[:2] == ["61.5 ± 6.4 (T 0.3)", "71.5 ± 6.4 (T 0.3)"]
    assert cells(text, "sus")[3] == "70.0 ± 0.0 (T 1)"
    assert "seeds: 2" in text and text.startswith("test problems")
    best = cells(text, "grpo-kl-0.1 (best GRPO)")
    assert best[0].startswith("+48 ± 0")  # 0.2 / 0.415
    rows = [line for line in text.splitlines() if "(best GRPO)" in line or "| grpo-kl-0 |" in line]
    assert "grpo-kl-0.1" in rows[1]  # the best first, after its own row of the upper table


def test_p_values_stand_at_the_planned_comparisons_only():
    assert ", p " not in compare.make_tables(world())
    text = compare.make_tables(world(), ("pass@1", "pass@5"))
    assert ", p " in cells(text, "grpo-kl-0.1 (best GRPO)")[0]
    assert ", p " in cells(text, "grpo-kl-0.1 (best GRPO)")[1]
    assert ", p " not in cells(text, "grpo-kl-0.1 (best GRPO)")[2]
    differences = text[text.index("sus over"):]
    assert ", p " in cells(differences, "passk")[0]
    assert ", p " in cells(differences, "grpo-kl-0")[0]
    assert ", p " not in cells(differences, "ss")[0]
    many = compare.make_tables(world(), (compare.WAYS_KEPT,))
    assert ", p " not in cells(many, "grpo-kl-0.1 (best GRPO)")[0]
    assert ", p " in cells(many, "grpo-kl-0.1 (best GRPO)")[4]


def test_other_measures_can_be_primary(tmp_path, capsys):
    """With one comparison instead of two, p is half as large."""
    found = [line for seed in (1, 2) for name, slope in (("sus", 0.01), ("passk", 0.03))
             for split in ("validation", "test")
             for line in lines(name, seed, (0.3, 0.5 + slope * seed, 0.5), split=split)]
    half = len(found) // 2  # seed 1 in one file, seed 2 in another
    for name, part in (("a", found[:half]), ("b", found[half:])):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in part))
    compare.main([str(tmp_path / "a"), str(tmp_path / "b"), "--goals", "pass@1"])
    one, both = capsys.readouterr().out, compare.make_tables(found, ("pass@1", "pass@5"))
    one, both = (cells(text[text.index("sus over"):], "passk") for text in (one, both))
    # Differences of 0.02 and 0.04: t = 3, whose p is 0.205 with one degree of freedom.
    p, doubled = (float(row[0].rpartition("p ")[2]) for row in (one, both))
    assert p == pytest.approx(0.205, abs=0.002) and doubled == pytest.approx(2 * p, abs=0.002)
    assert ", p " not in one[1] and ", p " in both[1]


def test_a_task_without_true_strategies_has_no_coverage():
    short = [{key: value for key, value in line.items() if key != "coverage"} for line in world()]
    text = compare.make_tables(short)
    assert "coverage" not in text and "pass@1 at equal pass@16" in text


def test_temperatures_that_were_chosen_on_the_same_problems_are_said_to_be():
    assert "chosen on validation problems" in compare.make_tables(world())
    test = [line for line in world() if line["split"] == "test"]
    assert "chosen on these test problems" in compare.make_tables(test)


def test_tuning_has_validation_alone_and_one_seed_no_interval():
    found = [line for line in world() if line["split"] == "validation" and line["seed"] == 1]
    text = compare.make_tables(found)
    assert text.startswith("validation problems, seeds: 1;")
    assert cells(text, "sus")[0] == "60.0 (T 0.3)"
    assert ", p " not in text


def test_settings_are_compared_on_the_seeds_that_both_have():
    found = [line for line in world() if (line["name"] == "sus") == (line["seed"] == 1)]
    assert "sus over" not in compare.make_tables(found)  # none in common
    both = world()
    alone = lines("sus", 3, (0.3, 0.1, 0.9), (1.0, 0.1, 0.9))
    alone += lines("sus", 3, (0.3, 0.1, 0.9), (1.0, 0.1, 0.9), split="validation")
    tables = [compare.make_tables(each) for each in (both, both + alone)]
    assert cells(tables[0], "sus") != cells(tables[1], "sus")
    rows = [cells(text[text.index("sus over"):], "passk") for text in tables]
    assert rows[0] == rows[1]


def test_results_in_the_repository_can_be_compared():
    found = sorted((Path(__file__).parents[2] / "results").glob("*.jsonl"))
    assert found
    for file in found:
        assert "| sus" in compare.make_tables(read_lines(file, key="split"))


def test_a_folder_is_named_as_its_setting():
    for folder, name in (("sus-countdown-1", "sus"), ("sus-countdown-1-2", "sus"),
                         ("grpo-kl-0.1-20", "grpo-kl-0.1"), ("mine", "mine")):
        assert compare.setting_name(Path("runs", folder), "countdown") == name


def test_a_single_setting_has_no_comparison():
    assert "sus over" not in compare.make_tables(CURVE)


def test_the_command_reads_a_file(tmp_path, capsys):
    file = tmp_path / "measures.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in world()))
    compare.main([str(file)])
    assert "| sus |" in capsys.readouterr().out
    for bad in (tmp_path / "nothing", tmp_path):
        with pytest.raises(SystemExit) as stopped:
            compare.main([str(bad)])
        assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    file.write_text('{"name": "sus"}\n')
    with pytest.raises(SystemExit):
        compare.main([str(file)])
    assert "line 1" in capsys.readouterr().err


def test_a_small_p_is_not_called_zero():
    assert [compare.name_p(p) for p in (0.0149, 0.001, 0.0009)] == ["p 0.015", "p 0.001",
                                                                    "p < 0.001"]
