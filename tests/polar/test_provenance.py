"""Where published tables come from: computed again digit by digit, and read backwards."""

import subprocess
import sys
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_lab.polar import Design, minimax, provenance, schedules

NAMES = [*schedules.known(), *schedules.circulating()]
DESIGNED = [name for name in NAMES if schedules.get(name).design]

#: How many numbers of how many follow to the last printed digit, and to how many digits all of them agree. Tables in
#: full precision carry the rounding of the solver that made them: in the last rows, where an interval is a millionth
#: wide or less, float64 leaves 5 to 8 digits of the best polynomial.
COMPARED = {
    "polar_express": (23, 24, 4),
    "cans": (15, 15, 4),
    "cubic5": (10, 10, 7),
    "polar_express_raw": (2, 24, 8),
    "polar_express_1.01": (1, 24, 5),
    "polar_express_1.02_5": (2, 15, 14),
    "polar_express_1.02": (2, 24, 7),
    "polar_express_1.05": (1, 15, 15),
    "cans_cubic7": (1, 14, 14),
    "cans_cubic10": (3, 18, 14),
}


def bent(schedule, row, index, change):
    """The schedule with one number changed, in four decimals."""
    rows = [list(r) for r in schedule.rows]
    rows[row][index] = round(rows[row][index] + change, 4)
    return replace(schedule, rows=tuple((a, b, c) for a, b, c in rows))


# --- forwards ---------------------------------------------------------------------------------------------------------


def test_every_table_with_a_design_is_compared():
    assert set(COMPARED) == set(DESIGNED) == {row["schedule"] for row in provenance.report()}


@pytest.mark.parametrize("name", DESIGNED)
def test_published_numbers_follow_from_their_parameters(name):
    rows = provenance.report((name,))
    assert (sum(row["follows"] for row in rows), len(rows), min(row["digits"] for row in rows)) == COMPARED[name]


@pytest.mark.parametrize("name", DESIGNED)
def test_all_but_the_last_rows_agree_to_what_float64_can_solve(name):
    """A 4 × 4 system with condition 1e3 or less is solved to 13 digits; the rounded tables to those that they have."""
    printed = schedules.get(name).design.decimals
    for row in provenance.report((name,)):
        if row["row"] <= 5:
            assert row["digits"] >= 13 if printed is None else abs(row["off"]) < 0.61


def test_one_digit_of_emerging_optimizers_is_a_misprint():
    (wrong,) = [row for row in provenance.report(("polar_express",)) if not row["follows"]]
    assert (wrong["row"], wrong["coefficient"], wrong["printed"]) == (1, "a", "8.2051")
    assert wrong["computed"].startswith("8.20516")
    assert wrong["off"] == pytest.approx(-0.604, abs=1e-3)


def test_the_sixth_decimal_of_every_full_table_but_one_number_is_right():
    wrong = [
        (row["schedule"], row["row"])
        for name in DESIGNED
        for row in provenance.report((name,))
        if schedules.get(name).design.decimals is None and abs(float(row["printed"]) - float(row["computed"])) > 5e-7
    ]
    assert set(wrong) == {("polar_express_1.01", 8)}  # off by 6e-7 in a, 1.2e-6 in b


def test_a_planted_deviation_is_read_back():
    made = schedules.get("minimax(lower=1e-3,decimals=4)")
    assert {row["off"] <= 0.5 for row in map(dict, provenance._compared(made))} == {True}
    rows = list(provenance._compared(bent(made, 2, 1, 3e-4)))
    (wrong,) = [row for row in rows if not row["follows"]]
    assert (wrong["row"], wrong["coefficient"]) == (3, "b")
    (right,) = [row for row in provenance._compared(made) if (row["row"], row["coefficient"]) == (3, "b")]
    assert wrong["off"] - right["off"] == pytest.approx(3.0, abs=1e-6)  # units of the fourth decimal


@pytest.mark.parametrize("name", DESIGNED)
def test_the_error_beside_a_published_table_is_proven(name):
    schedule = schedules.get(name)
    rows = schedule.rows[: schedule.design.steps]
    assert schedule.design.worst == minimax.worst(rows, repr(schedule.design.lower))


def test_four_decimals_cost_cans_six_percent():
    """Full precision and seven decimals cost nothing: what solvers lost before step 8 no error shows."""
    ratios = {}
    for name in DESIGNED:
        design = schedules.get(name).design
        if design.steps < 8:
            ratios[name] = design.worst / minimax.schedule(replace(design, decimals=None)).design.worst
    assert ratios.pop("cans") == pytest.approx(1.056, abs=5e-4)
    assert ratios.pop("cubic5") == pytest.approx(1.0, abs=1e-6)
    assert all(ratio == pytest.approx(1.0, abs=1e-11) for ratio in ratios.values())


def test_names_without_a_design_are_refused():
    with pytest.raises(ValueError, match="schedule 'simple' has no design"):
        provenance.report(("simple",))


# --- backwards --------------------------------------------------------------------------------------------------------

#: The parameters that are found from the numbers alone.
FOUND = {
    "polar_express": "minimax(lower=0.001,cushion=0.02407,safety=0.01,applied=after,decimals=4)",
    "cans": "minimax(lower=0.001,decimals=4)",
    "cubic5": "minimax(lower=0.007,degree=3,ceiling=1.3,decimals=7)",
    "polar_express_1.01": "minimax(lower=0.001,cushion=0.02,safety=0.01)",
    "polar_express_1.02_5": "minimax(lower=0.001,cushion=0.02,safety=0.02)",
    "polar_express_1.02": "minimax(lower=0.001,cushion=0.02,safety=0.02)",
    "cans_cubic7": "minimax(lower=0.0009,degree=3)",
    "cans_cubic10": "minimax(lower=0.00085,degree=3)",
}


@pytest.mark.parametrize("name", FOUND)
def test_parameters_are_found_from_the_numbers_alone(name):
    found = provenance.explain(replace(schedules.get(name), design=None))
    assert found.design.name == FOUND[name]
    assert found.verdict.startswith(FOUND[name])


@pytest.mark.parametrize(("name", "safety"), [("polar_express_raw", 0.0), ("polar_express_1.05", 0.05)])
def test_the_odd_cushion_of_the_paper_is_found_to_fourteen_digits(name, safety):
    design = provenance.explain(schedules.get(name)).design
    assert (design.lower, design.safety) == (1e-3, safety)
    assert design.cushion == pytest.approx(schedules.get("polar_express").design.cushion, rel=1e-14)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("simple", "step 2 is made for 1.0429 times what step 1 leaves, needed 1.2539"),
        ("deepseekv4", "step 1 is centred at 0.9421"),
        ("quintic", "step 1 is centred at 0.6500"),
        ("aol", "step 1 is optimal on no interval"),
        ("modula6", "step 1 is centred at 0.7697"),
        ("cubic", "what a minimax step becomes as its interval closes about 1"),
        ("taylor", "what a minimax step becomes as its interval closes about 1"),
    ],
)
def test_what_is_no_minimax_composition_has_no_parameters(name, reason):
    found = provenance.explain(schedules.get(name))
    assert found.design is None
    assert found.follows == found.digits == 0
    assert found.verdict.startswith("no parameters found: not a minimax composition (")
    assert reason in found.verdict


def test_every_table_is_explained_one_way_or_the_other():
    assert {name for name in NAMES if provenance.explain(schedules.get(name)).design} == set(DESIGNED)


@given(
    st.sampled_from([1e-5, 2e-4, 1e-3, 3e-2]),
    st.sampled_from([3, 5]),
    st.sampled_from([0.0, 0.03, 0.125]),
    st.sampled_from([0.0, 0.01, 0.05]),
    st.sampled_from(schedules.APPLIED),
    st.sampled_from([4, 6]),
)
def test_designs_are_found_again(lower, degree, cushion, safety, applied, steps):
    plain = degree == 3  # cubics are read without cushion and safety
    design = Design(lower, steps, degree, 0.0 if plain else cushion, 0.0 if plain else safety, applied)
    made = minimax.schedule(design)
    found = provenance.explain(replace(made, design=None))
    assert found.design is not None
    assert found.follows == found.numbers  # if another design has the same numbers, it is as good
    assert [minimax.schedule(found.design).rows, found.digits >= 15] == [made.rows, True]


@pytest.mark.parametrize("name", ["cans", "polar_express_1.02_5", "cubic5"])
def test_steps_in_another_order_are_no_composition(name):
    schedule = schedules.get(name)
    for order in list(permutations(schedule.rows))[1:6]:
        assert provenance.explain(replace(schedule, rows=order)).design is None


def test_a_changed_number_is_missed():
    cans = schedules.get("cans")
    assert provenance.explain(bent(cans, 3, 0, 1e-3)).follows == 14
    assert provenance.explain(bent(cans, 3, 0, 0.1)).design is None


# --- one row ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [3, 5])
@pytest.mark.parametrize(("lower", "upper"), [("0.001", "1"), ("0.1", "1.9"), ("0.5", "1.5")])
def test_a_row_tells_its_interval(lower, upper, degree):
    best = minimax.fit(lower, upper, degree)
    row = tuple(float(x) for x in best.coefficients)
    found = provenance.implied(tuple(1.2 * x for x in row), float(upper))
    assert found.upper == pytest.approx(float(upper), rel=1e-12)
    # p is 8 steep at the lower end of the first, where its value is 0.008: roundings are seen a hundredfold
    assert found.lower == pytest.approx(float(lower), rel=1e-11)
    assert found.centre == pytest.approx(1.2, rel=1e-12)
    assert found.ripple == pytest.approx(float(best.error), rel=1e-12)
    assert (found.low + found.high) / 2 == pytest.approx(found.centre)


@pytest.mark.parametrize(
    "row",
    [
        (1.0, 0.0, 0.0),
        (1.5, 0.5, 0.0),  # no turn
        (1.5, -0.5, 0.0),  # a cubic turns at 1, no interval ends there
        (15 / 8, -10 / 8, 3 / 8),  # a double turn
        (4.0098, -7.0585, 2.4635),  # a minimum below 0
        (1.0, 1.0, -1.0),  # one turn
    ],
)
def test_a_row_that_is_optimal_nowhere_says_so(row):
    assert provenance.implied(row, 1.0) is None


def test_quintic_is_made_for_more_than_it_leaves():
    """You Jiacheng's steps are optimal, each on an interval, but about constants below 1 and with room above: their
    upper ends exceed what the step before leaves by 1 to 6 %."""
    found = provenance.explain(schedules.get("quintic"))
    centres = [row.centre for row in found.rows]
    assert centres == pytest.approx([0.650, 0.736, 0.815, 1.032, 1.061], abs=5e-4)
    assert found.chain == pytest.approx((1.035, 1.034, 1.006, 1.057), abs=6e-4)
    assert found.rows[0].lower == pytest.approx(0.00656, abs=5e-6)
    assert found.rows[0].upper == pytest.approx(1.3207, abs=5e-5)


# --- to read ----------------------------------------------------------------------------------------------------------


def test_the_report_names_every_table_its_source_and_its_parameters():
    text = provenance.text()
    for name in NAMES:
        schedule = schedules.get(name)
        told = text.split(f"\n{name}: ")[1].split("\n\n")[0]
        assert schedule.source in " ".join(told.split())
        assert told.startswith(schedule.design.name if schedule.design else "no parameters found: ")
    assert max(map(len, text.splitlines())) < 140


@pytest.mark.parametrize("name", DESIGNED)
def test_the_report_counts_as_the_comparison_does(name):
    follow, numbers, digits = COMPARED[name]
    (line,) = [line for line in provenance.text([name]).splitlines() if line.startswith(f"{name} ")][:1]
    assert line.endswith(f"{follow} of {numbers}".rjust(19) + f"{digits}".rjust(15))


def test_the_report_lists_digits_that_do_not_follow_and_no_others():
    wrong = provenance.text().rpartition("\n\n")[2].splitlines()
    assert wrong[0].split() == ["does", "not", "follow", "row", "coefficient", "printed", "computed", "digits"]
    found = {tuple(line.split()[:3]) for line in wrong[1:]}
    assert ("polar_express", "1", "a") in found
    assert {(name, row) for name, row, _ in found} == {
        ("polar_express", "1"),
        *((name, row) for name in ("polar_express_raw", "polar_express_1.01", "polar_express_1.02") for row in "78"),
    }
    assert "does not follow" not in provenance.text(["cans", "quintic", "polar_express_1.05"])


def test_the_report_is_a_command(capsys):
    assert provenance.main(["cans"]) == 0
    assert capsys.readouterr().out == provenance.text(["cans"]) + "\n"
    assert provenance.main(["canns"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("muon_lab.polar.provenance: unknown schedule 'canns': did you mean 'cans'")


def test_the_command_explains_itself(capsys):
    with pytest.raises(SystemExit) as left:
        provenance.main(["--help"])
    assert left.value.code == 0
    assert "usage: python -m muon_lab.polar.provenance" in (told := capsys.readouterr().out)
    assert "polar_express_1.02_5" in told
    with pytest.raises(SystemExit) as left:
        provenance.main(["--frobnicate"])
    assert left.value.code == 2
    assert capsys.readouterr().err == "muon_lab.polar.provenance: unrecognized arguments: --frobnicate\n"


def test_an_interruption_is_one_line(capsys, monkeypatch):
    def interrupted(names):
        raise KeyboardInterrupt

    monkeypatch.setattr(provenance, "text", interrupted)
    assert provenance.main([]) == 130
    assert capsys.readouterr().err == "muon_lab.polar.provenance: interrupted\n"


def test_a_reader_may_leave_early():
    command = f"set -o pipefail; {sys.executable} -m muon_lab.polar.provenance cans | true"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_the_command_needs_no_torch():
    code = "import sys; from muon_lab.polar import provenance as p; p.main(['cans']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
