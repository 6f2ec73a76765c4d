import matplotlib
import pytest
from matplotlib.figure import Figure

from muon_lab.figures import style


def axes():
    return Figure().subplots()


def labels(axis):
    return [tick.get_text() for tick in axis.get_ticklabels()]


def test_every_method_has_a_colour_of_its_own():
    assert len(set(style.METHODS.values())) == len(style.METHODS)
    assert not set(style.METHODS.values()) & {style.colour(f"unknown_{index}") for index in range(100)}


def test_every_format_has_a_marker_of_its_own():
    assert len({*style.MARKERS.values(), style.marker("unknown")}) == len(style.MARKERS) + 1


def test_every_number_format_has_a_colour_of_its_own():
    assert len(set(style.FORMATS.values())) == len(style.FORMATS)
    assert not set(style.FORMATS.values()) & {style.format_colour(f"unknown_{index}") for index in range(100)}


def test_all_formats_of_the_stability_study_have_a_colour():
    from muon_lab.studies.stability import Axes

    assert set(Axes().format) <= set(style.FORMATS)


def test_all_published_schedules_have_a_colour():
    from muon_lab.studies import methods

    assert set(methods.known()) <= set(style.METHODS)


FORMS = ("", "gram:", "gram@2,3:", "auto:")
STARTS = ("", "frobenius-1:", "spectral:", "schatten4-1:", "aol-1:")


@pytest.mark.parametrize("name", ["quintic", "taylor", "mine", "minimax(lower=1e-3)"])
def test_a_form_keeps_the_colour_and_shows_in_the_line(name):
    looks = {(style.colour(form + name), str(style.dashes(form + name)), style.face(form + name)) for form in FORMS}
    assert len({colour for colour, _, _ in looks}) == 1
    assert len(looks) == 3  # restarts aside


@pytest.mark.parametrize("name", style.METHODS)
def test_a_start_and_a_depth_are_shades_of_their_schedule_and_of_no_other(name):
    shades = [style.colour(start + name) for start in STARTS]
    assert len(set(shades)) == len(STARTS) - 1  # Frobenius is what is meant anyway
    assert shades[0] == shades[1] == style.METHODS[name]
    assert style.colour("gram:" + STARTS[3] + name) == shades[3]
    assert not {*shades[2:]} & ({*style.METHODS.values()} | {style.colour(f"unknown_{index}") for index in range(100)})


def test_designs_are_the_deeper_the_darker():
    shades = [
        style.colour(f"minimax(lower={lower},cushion=0.02)") for lower in ("0.3", "1e-1", "1e-2", "0.001", "1e-4")
    ]
    greens = [int(shade[3:5], 16) for shade in shades]
    assert greens == sorted(set(greens), reverse=True)
    assert shades[-1] == style.METHODS["minimax"]
    assert style.colour("minimax(degree=3, lower = 1e-3)") == style.colour("minimax(lower=1e-3)")


def test_methods_that_begin_alike_show_through():
    assert style.dashes("deepseekv4") != style.dashes("simple")
    assert style.dashes("gram:deepseekv4") == style.dashes("gram:simple")


def test_house_leaves_no_trace_and_overrides_the_user():
    with matplotlib.rc_context({"font.size": 30.0, "lines.linewidth": 9.0, "axes.facecolor": "red"}):
        with style.house():
            assert matplotlib.rcParams["font.size"] == style.HOUSE["font.size"]
            assert matplotlib.rcParams["axes.facecolor"] == "white"
        assert matplotlib.rcParams["font.size"] == 30.0


@pytest.mark.parametrize("family", [style.HOUSE["font.family"]])
def test_the_font_ships_with_matplotlib(family):
    from matplotlib import font_manager

    assert font_manager.findfont(family, fallback_to_default=False).startswith(matplotlib.get_data_path())


def test_binary_ticks_are_plain_numbers():
    one = axes()
    one.plot([1, 8], [1, 1])
    style.log2(one, "x", [8, 1, 2, 4, 4])
    assert labels(one.xaxis) == ["1", "2", "4", "8"]
    assert list(one.xaxis.get_minorticklocs()) == []


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (1e-4, 2.0, ["$10^{-4}$", "$10^{-3}$", "$10^{-2}$", "$10^{-1}$", "1"]),
        (1e-16, 1.0, ["$10^{-15}$", "$10^{-12}$", "$10^{-9}$", "$10^{-6}$", "$10^{-3}$", "1"]),
        (0.2, 0.9, ["0.2", "0.5"]),
        (3.0, 7.0, ["5"]),
    ],
)
def test_decimal_ticks_lie_inside_and_are_few(low, high, wanted):
    one = axes()
    style.log10(one, "y", low, high)
    assert labels(one.yaxis) == wanted
    assert one.get_ylim() == (low, high)


@pytest.mark.parametrize(("most", "wanted"), [(6, ["0.2", "0.5", "1", "2", "5"]), (4, ["0.2", "1", "5"]), (2, ["1"])])
def test_ticks_within_a_decade_are_no_more_than_wanted(most, wanted):
    one = axes()
    style.log10(one, "x", 0.11, 9.0, most=most)
    assert len(wanted) <= most
    assert labels(one.xaxis) == wanted
