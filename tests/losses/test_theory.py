"""Property tests of the statements of docs/theory.md, with random soft and hard vectors and ties.

The tests compare with the paper's formulas (written with norms), SciPy's distances, and all vertices.
They call the losses through the public functions only.
"""

import ast
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import scipy.spatial.distance
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import semidice

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "theory.md").read_text(encoding="utf-8")

law = settings(deadline=None, derandomize=True, max_examples=64)

# 0, 0.5 and 1 are drawn often, so that ties and hard voxels are common. No number lies between 0 and 1e-3,
# because in float64 the square of a number below 1e-162 is 0, and the laws hold for real numbers.
unit = st.sampled_from([0.0, 0.5, 1.0]) | st.integers(0, 8).map(lambda n: n / 8) | st.floats(1e-3, 1)
weight = st.sampled_from([0.3, 0.5, 0.7, 1.0]) | st.floats(0.05, 3)
both_soft_forms = pytest.mark.parametrize("form", ["min", "product"])
every_form = pytest.mark.parametrize("form", ["min", "product", "squared", "relaxed"])


@st.composite
def vectors(draw: st.DrawFn, count: int, *, max_size: int = 8, voxel: st.SearchStrategy[float] = unit):
    """`count` float64 vectors of one length; an entry may repeat that of the first vector."""
    rest = [st.none() | voxel] * (count - 1)
    rows = draw(st.lists(st.tuples(voxel, *rest), min_size=1, max_size=max_size))
    filled = [[row[0] if entry is None else entry for entry in row] for row in rows]
    return torch.tensor(filled, dtype=torch.float64).unbind(1)


@st.composite
def pairs_with_hard_voxels(draw: st.DrawFn):
    """Two vectors; in every voxel, at least one of them is 0 or 1."""
    hard = st.sampled_from([0.0, 1.0])
    rows = draw(st.lists(st.tuples(unit, hard) | st.tuples(hard, unit), min_size=1, max_size=8))
    return torch.tensor(rows, dtype=torch.float64).unbind(1)


def vector(*entries: float) -> Tensor:
    return torch.tensor(entries, dtype=torch.float64)


def image(entries: Tensor) -> Tensor:
    return entries.reshape(1, 1, -1)


def dice(x: Tensor, y: Tensor, form: str = "min") -> float:
    return float(semidice.dice_loss(image(x), image(y), form=form))


def jaccard(x: Tensor, y: Tensor, form: str = "min") -> float:
    return float(semidice.jaccard_loss(image(x), image(y), form=form))


def tversky(x: Tensor, y: Tensor, alpha: float, beta: float, **options) -> float:
    return float(semidice.tversky_loss(image(x), image(y), alpha=alpha, beta=beta, **options))


def gradient(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0]


def tversky_gradient(x: Tensor, y: Tensor, alpha: float, beta: float, form: str) -> Tensor:
    return gradient(lambda x: semidice.tversky_loss(image(x), image(y), alpha=alpha, beta=beta, form=form), x)


def index(probs: Tensor, y: Tensor, alpha: float, beta: float, form: str) -> Tensor:
    """Index of each row of `probs` against `y`."""
    stats = semidice.overlap_stats(probs.unsqueeze(1), y.expand_as(probs).unsqueeze(1), form=form)
    return semidice.tversky_index(stats, alpha=alpha, beta=beta)[:, 0]


def differ(x: Tensor, y: Tensor) -> bool:
    return bool((x - y).abs().max() > 1e-6)


def l1(v: Tensor) -> Tensor:
    return v.abs().sum()


def l2_squared(v: Tensor) -> Tensor:
    return v.square().sum()


# The formulas as the paper prints them: equations 1 to 6 and appendix D.
def paper_sdl(x, y, size=l1):
    return 1 - 2 * (x @ y) / (size(x) + size(y))


def paper_sjl(x, y, size=l1):
    return 1 - (x @ y) / (size(x) + size(y) - x @ y)


def paper_jml1(x, y, size=l1):
    return 1 - (size(x) + size(y) - size(x - y)) / (size(x) + size(y) + size(x - y))


def paper_jml2(x, y, size=l1):
    return 1 - (x @ y) / (x @ y + size(x - y))


def paper_dml1(x, y, size=l1):
    return 1 - (size(x) + size(y) - size(x - y)) / (size(x) + size(y))


def paper_dml2(x, y, size=l1):
    return 1 - 2 * (x @ y) / (2 * (x @ y) + size(x - y))


def paper_stl(x, y, alpha, beta):
    return 1 - (x @ y) / (alpha * l1(x) + beta * l1(y) + (1 - alpha - beta) * (x @ y))


def paper_ctl(x, y, alpha, beta):
    twice_overlap = l1(x) + l1(y) - l1(x - y)
    return 1 - twice_overlap / (2 * alpha * l1(x) + 2 * beta * l1(y) + (1 - alpha - beta) * twice_overlap)


PAPER = {
    "SDL": lambda x, y, a, b, g: paper_sdl(x, y),
    "SJL": lambda x, y, a, b, g: paper_sjl(x, y),
    "STL": lambda x, y, a, b, g: paper_stl(x, y, a, b),
    "DML1": lambda x, y, a, b, g: paper_dml1(x, y),
    "DML2": lambda x, y, a, b, g: paper_dml2(x, y),
    "JML1": lambda x, y, a, b, g: paper_jml1(x, y),
    "JML2": lambda x, y, a, b, g: paper_jml2(x, y),
    "CTL": lambda x, y, a, b, g: paper_ctl(x, y, a, b),
    "CFTL": lambda x, y, a, b, g: paper_ctl(x, y, a, b).clamp_min(0) ** g,
    "SDL, DML1, DML2 in L2": lambda x, y, a, b, g: paper_sdl(x, y, l2_squared),
    "SJL, JML1, JML2 in L2": lambda x, y, a, b, g: paper_sjl(x, y, l2_squared),
}
# | name | anything | `call` |
NAMED_CALLS = dict(re.findall(r"^\| ([A-Z][^|]+?) \|[^|]*\| `(\w+_loss\([^`]*\))` \|$", PAGE, re.MULTILINE))


# Definitions


def test_the_table_of_names_lists_every_loss_of_the_paper():
    assert NAMED_CALLS.keys() == PAPER.keys()


@law
@given(vectors(2), weight, weight, st.sampled_from([0.5, 1.0, 2.0]))
def test_each_call_in_the_table_of_names_equals_the_formula_of_the_paper(pair, alpha, beta, gamma):
    x, y = pair
    assume(x.any() or y.any())
    names = {"prob": image(x), "target": image(y), "alpha": alpha, "beta": beta, "gamma": gamma}
    actual = {name: float(eval(call, vars(semidice), names)) for name, call in NAMED_CALLS.items()}
    paper = {name: float(formula(x, y, alpha, beta, gamma)) for name, formula in PAPER.items()}
    # 1e-7, because the focal exponent 0.5 turns a rounding error of 1e-16 into 1e-8
    assert actual == pytest.approx(paper, abs=1e-7)


@every_form
@law
@given(vectors(2), weight, weight)
def test_a_loss_lies_between_0_and_1(form, pair, alpha, beta):
    beta = alpha if form == "squared" else beta
    assert 0 <= tversky(*pair, alpha, beta, form=form) <= 1


# The minimum is the label


@both_soft_forms
@law
@given(vectors(1), weight, weight)
def test_loss_and_gradient_are_0_at_the_label(form, single, alpha, beta):
    (y,) = single
    assert tversky(y, y, alpha, beta, form=form) == 0
    assert not tversky_gradient(y, y, alpha, beta, form).any()


@both_soft_forms
@law
@given(vectors(2), weight, weight)
def test_the_loss_is_positive_if_prediction_and_label_differ(form, pair, alpha, beta):
    assume(differ(*pair))
    assert tversky(*pair, alpha, beta, form=form) > 0


@law
@given(vectors(2), weight)
def test_the_squared_form_is_0_at_the_label_and_positive_elsewhere(pair, alpha):
    x, y = pair
    assert tversky(y, y, alpha, alpha, form="squared") == 0
    assume(differ(x, y))
    assert tversky(x, y, alpha, alpha, form="squared") > 0


@both_soft_forms
@law
@given(vectors(2), weight)
def test_the_loss_is_not_positive_everywhere_if_a_weight_is_0(form, pair, positive):
    low, high = torch.minimum(*pair), torch.maximum(*pair)
    assert tversky(high, low, 0.0, positive, form=form) == 0
    assert tversky(low, high, positive, 0.0, form=form) == 0
    with pytest.raises(ValueError, match="both 0"):
        tversky(low, high, 0.0, 0.0, form=form)


@law
@given(vectors(2), weight, weight)
def test_the_compatible_tversky_loss_of_the_paper_is_the_min_form(pair, alpha, beta):
    x, y = pair
    assume(x.any() or y.any())
    assert tversky(x, y, alpha, beta) == pytest.approx(float(paper_ctl(x, y, alpha, beta)), abs=1e-12)


@law
@given(vectors(2), weight, weight, st.floats(0.5, 4))
def test_the_focal_loss_is_a_power_of_the_tversky_loss(pair, alpha, beta, gamma):
    expected = tversky(*pair, alpha, beta) ** gamma
    assert tversky(*pair, alpha, beta, gamma=gamma) == pytest.approx(expected, abs=1e-12)


@both_soft_forms
@law
@given(vectors(2), weight, weight)
def test_focal_log_and_smooth_keep_the_minimum_at_the_label(form, pair, alpha, beta):
    x, y = pair
    for options in ({"gamma": 2.0}, {"gamma": 0.5}, {"log": True}, {"smooth": 1.0}):
        assert tversky(y, y, alpha, beta, form=form, **options) == 0
        if differ(x, y):
            assert tversky(x, y, alpha, beta, form=form, **options) > 0


@law
@given(vectors(2), weight, weight)
def test_dml1_moves_every_voxel_towards_its_label(pair, alpha, beta):
    x, y = pair
    towards = tversky_gradient(x, y, alpha, beta, "min") * (y - x)
    assert (towards <= 0).all()
    if torch.minimum(x, y).any():
        assert (towards < 0).equal(x != y)


def test_dml2_can_move_a_voxel_away_from_its_label_while_others_are_wrong():
    x, y = vector(0.6, 1.0), vector(0.5, 0.0)
    assert tversky_gradient(x, y, 0.5, 0.5, "product")[0] < 0
    assert tversky_gradient(x, y, 0.5, 0.5, "min")[0] > 0
    others_correct = vector(0.6, 0.0)
    assert tversky_gradient(others_correct, y, 0.5, 0.5, "product")[0] > 0


@both_soft_forms
@law
@given(vectors(2), weight, weight)
def test_only_the_label_is_a_local_minimum(form, pair, alpha, beta):
    x, y = pair
    assume(differ(x, y) and y.any())
    assert (tversky_gradient(x, y, alpha, beta, form) * (y - x) < 0).any()


@every_form
@law
@given(vectors(1), weight)
def test_an_empty_label_gives_loss_1_without_gradient(form, single, alpha):
    (x,) = single
    assume(x.any())
    empty = torch.zeros_like(x)
    assert tversky(x, empty, alpha, alpha, form=form) == 1
    assert not tversky_gradient(x, empty, alpha, alpha, form).any()
    assert tversky(empty, empty, alpha, alpha, form=form) == 0


def test_smooth_gives_an_empty_label_a_gradient():
    x, empty = vector(0.3, 0.6), vector(0.0, 0.0)
    smoothed = gradient(lambda x: semidice.dice_loss(image(x), image(empty), smooth=1.0), x)
    assert (smoothed > 0).all()


@every_form
@law
@given(vectors(2), weight, weight)
def test_exchanging_prediction_and_label_exchanges_alpha_and_beta(form, pair, alpha, beta):
    x, y = pair
    beta = alpha if form == "squared" else beta
    exchanged = tversky(y, x, beta, alpha, form=form)
    assert tversky(x, y, alpha, beta, form=form) == pytest.approx(exchanged, abs=1e-12)


def test_a_tversky_loss_with_different_weights_is_not_symmetric():
    x, y = vector(0.4), vector(0.8)
    assert tversky(x, y, 0.7, 0.3) != pytest.approx(tversky(y, x, 0.7, 0.3), abs=0.1)


# The soft Dice loss on soft labels


@law
@given(vectors(1))
def test_the_soft_dice_loss_of_a_soft_label_with_itself_is_not_0(single):
    (y,) = single
    assume(y.any())
    expected = 1 - l2_squared(y) / l1(y)
    assert dice(y, y, "relaxed") == pytest.approx(float(expected), abs=1e-12)


@law
@given(st.floats(1e-3, 1))
def test_the_soft_dice_loss_moves_a_single_voxel_to_1_for_any_label(label):
    probs = torch.linspace(0, 1, 201, dtype=torch.float64).unsqueeze(1)
    for alpha in (0.5, 1.0):
        scores = index(probs, vector(label), alpha, alpha, "relaxed")
        assert (scores.diff() > 0).all()
    assert index(probs, vector(0.5), 0.5, 0.5, "min").argmax() == 100


def vertices(size: int) -> Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)), dtype=torch.float64)


@law
@given(vectors(2), weight, weight, st.sampled_from(["SDL", "SJL", "STL"]))
def test_the_soft_losses_threshold_a_soft_label(pair, alpha, beta, name):
    x, y = pair
    assume(y.any())
    alpha, beta = {"SDL": (0.5, 0.5), "SJL": (1.0, 1.0), "STL": (alpha, beta)}[name]
    corners = vertices(len(y))
    scores = index(corners, y, alpha, beta, "relaxed")
    best = float(scores.max())
    threshold = alpha * best / (1 - (1 - alpha - beta) * best)
    if name == "SDL":
        assert threshold == pytest.approx(best / 2)
    rule = (y > threshold).double()
    assert float(index(rule.unsqueeze(0), y, alpha, beta, "relaxed")) == pytest.approx(best, abs=1e-12)
    assert float(index(x.unsqueeze(0), y, alpha, beta, "relaxed")) <= best + 1e-12
    if ((y - threshold).abs() > 1e-6).all():
        assert corners[scores > best - 1e-12].equal(rule.unsqueeze(0))


def test_no_point_of_a_fine_grid_beats_the_thresholded_label():
    y = vector(0.3, 0.7)
    axis = torch.linspace(0, 1, 101, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    scores = index(grid, y, 0.5, 0.5, "relaxed")
    assert grid[scores.argmax()].equal((y > scores.max() / 2).double())
    assert grid[index(grid, y, 0.5, 0.5, "min").argmax()].sub(y).abs().max() < 1e-12


@law
@given(vectors(1))
def test_the_threshold_is_one_half_for_hard_labels_and_less_for_soft_ones(single):
    (y,) = single
    assume(y.any())
    threshold = float(index(vertices(len(y)), y, 0.5, 0.5, "relaxed").max()) / 2
    softness = (y * (1 - y)).sum()
    if softness == 0:
        assert threshold == 0.5
    else:
        # for almost hard labels, the difference from one half can be smaller than the rounding error
        assert threshold < 0.5 or softness < 1e-12


@law
@given(vectors(1))
def test_soft_dice_and_soft_jaccard_have_the_same_threshold(single):
    (y,) = single
    assume(y.any())
    corners = vertices(len(y))
    best_dice = float(index(corners, y, 0.5, 0.5, "relaxed").max())
    best_jaccard = float(index(corners, y, 1.0, 1.0, "relaxed").max())
    assert best_dice / 2 == pytest.approx(best_jaccard / (1 + best_jaccard), abs=1e-12)


def test_the_soft_dice_loss_of_the_landing_figure_thresholds_at_0_387():
    y = torch.linspace(0, 1, 21, dtype=torch.float64)
    # the best vertex is a thresholded label, so it is enough to try 21 thresholds
    rules = torch.stack([(y > t).double() for t in y - 1e-9])
    assert float(index(rules, y, 0.5, 0.5, "relaxed").max()) / 2 == pytest.approx(0.387, abs=5e-4)
    assert "0.387" in PAGE


# Identities


@law
@given(pairs_with_hard_voxels(), weight, weight)
def test_min_product_and_relaxed_agree_if_prediction_or_label_is_hard(pair, alpha, beta):
    x, y = pair
    by_form = [tversky(x, y, alpha, beta, form=form) for form in ("min", "product", "relaxed")]
    assert by_form == pytest.approx([by_form[0]] * 3, abs=1e-12)
    if x.any() or y.any():
        assert by_form[0] == pytest.approx(float(paper_stl(x, y, alpha, beta)), abs=1e-12)


def test_the_losses_of_the_paper_differ_if_prediction_and_label_are_soft():
    x, y = vector(0.4), vector(0.8)
    assert dice(x, y) == pytest.approx(1 / 3)
    assert dice(x, y, "product") == pytest.approx(5 / 13)
    assert dice(x, y, "relaxed") == pytest.approx(7 / 15)
    assert tversky(x, y, 0.7, 0.3) != pytest.approx(tversky(x, y, 0.7, 0.3, form="relaxed"), abs=0.05)


def test_the_squared_form_differs_on_hard_labels():
    assert dice(vector(0.5), vector(1.0), "squared") == pytest.approx(0.2)
    assert dice(vector(0.5), vector(1.0)) == pytest.approx(1 / 3)


@law
@given(vectors(2), weight, weight)
def test_the_min_form_is_never_above_the_product_form(pair, alpha, beta):
    assert dice(*pair) <= dice(*pair, "product") + 1e-12
    assert jaccard(*pair) <= jaccard(*pair, "product") + 1e-12
    assert tversky(*pair, alpha, beta) <= tversky(*pair, alpha, beta, form="product") + 1e-12


@law
@given(vectors(2))
def test_three_losses_are_equal_with_the_squared_norm(pair):
    x, y = pair
    assume(x.any() or y.any())
    for paper_dice in (paper_sdl, paper_dml1, paper_dml2):
        assert dice(x, y, "squared") == pytest.approx(float(paper_dice(x, y, l2_squared)), abs=1e-12)
    for paper_jaccard in (paper_sjl, paper_jml1, paper_jml2):
        assert jaccard(x, y, "squared") == pytest.approx(float(paper_jaccard(x, y, l2_squared)), abs=1e-12)


def test_a_loss_with_a_norm_that_is_not_squared_can_leave_the_unit_interval():
    ones = torch.ones(4, dtype=torch.float64)
    assert float(paper_sdl(ones, ones, lambda v: l2_squared(v).sqrt())) == -1
    half = vector(0.5)
    assert float(paper_sdl(half, half, lambda v: l2_squared(v).sqrt())) == 0.5


def test_the_squared_index_exceeds_1_when_alpha_and_beta_differ():
    stats = semidice.overlap_stats(image(vector(0.5)), image(vector(1.0)), form="squared")
    assert [float(part) for part in stats] == [0.5, -0.25, 0.5]
    assert float(semidice.tversky_index(stats, alpha=0.7, beta=0.3)) == pytest.approx(20 / 19)
    assert float(semidice.tversky_index(stats, alpha=0.5, beta=0.5)) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="alpha = beta"):
        semidice.tversky_loss(image(vector(0.5)), image(vector(1.0)), alpha=0.7, beta=0.3, form="squared")


def dice_of_jaccard(j: float) -> float:
    return j / (2 - j)


@every_form
@law
@given(vectors(2))
def test_dice_is_jaccard_over_two_minus_jaccard(form, pair):
    assert dice(*pair, form) == pytest.approx(dice_of_jaccard(jaccard(*pair, form)), abs=1e-12)


@law
@given(vectors(2))
def test_dml1_is_the_bray_curtis_dissimilarity(pair):
    x, y = pair
    assume(x.any() or y.any())
    expected = scipy.spatial.distance.braycurtis(x.numpy(), y.numpy())
    assert dice(x, y) == pytest.approx(expected, abs=1e-12)


@law
@given(vectors(2))
def test_jml1_is_the_soergel_distance(pair):
    x, y = pair
    assume(x.any() or y.any())
    soergel = l1(x - y) / torch.maximum(x, y).sum()
    ruzicka = torch.minimum(x, y).sum() / torch.maximum(x, y).sum()
    assert jaccard(x, y) == pytest.approx(float(soergel), abs=1e-12)
    assert 1 - jaccard(x, y) == pytest.approx(float(ruzicka), abs=1e-12)


@law
@given(vectors(2, voxel=st.integers(0, 8).map(lambda n: n / 8)))
def test_dml1_and_jml1_are_distances_between_sets_of_cells(pair):
    x, y = pair
    assume(x.any() or y.any())
    cells = [(v.unsqueeze(1) * 8 > torch.arange(8)).flatten().numpy() for v in (x, y)]
    assert dice(x, y) == pytest.approx(scipy.spatial.distance.dice(*cells), abs=1e-12)
    assert jaccard(x, y) == pytest.approx(scipy.spatial.distance.jaccard(*cells), abs=1e-12)


# Distances


@both_soft_forms
@law
@given(vectors(3))
def test_the_overlap_changes_no_more_than_its_argument(form, triple):
    a, b, c = triple
    tp_ab = float(semidice.overlap_stats(image(a), image(b), form=form).tp)
    tp_ac = float(semidice.overlap_stats(image(a), image(c), form=form).tp)
    assert abs(tp_ab - tp_ac) <= float(l1(b - c)) + 1e-12


@both_soft_forms
@law
@given(vectors(3))
def test_the_jaccard_losses_obey_the_triangle_inequality(form, triple):
    a, b, c = triple
    assert jaccard(a, c, form) <= jaccard(a, b, form) + jaccard(b, c, form) + 1e-12


def test_random_triples_obey_the_triangle_inequalities_of_jaccard_and_dice():
    generator = torch.Generator().manual_seed(0)
    for size, form in itertools.product((1, 2, 3, 4), ("min", "product")):
        a, b, c = (3 * torch.randn(3, 50_000, size, generator=generator, dtype=torch.float64)).sigmoid()
        for scale, rho in ((1.0, 1.0), (0.5, 1.5)):
            ab, bc, ac = (1 - index(x, y, scale, scale, form) for x, y in ((a, b), (b, c), (a, c)))
            assert (ac - rho * (ab + bc)).max() <= 1e-12


@law
@given(unit, unit)
def test_dice_is_a_convex_increasing_function_of_jaccard(u, v):
    assert dice_of_jaccard(u) + dice_of_jaccard(v) >= 2 * dice_of_jaccard((u + v) / 2) - 1e-15
    assert (dice_of_jaccard(u) < dice_of_jaccard(v)) == (u < v)


def bound_of_the_proof(u: float) -> float:
    return (2 - u / 2) / (2 - u) if u <= 1 else (2 - u / 2) / u


@both_soft_forms
@law
@given(vectors(3))
def test_the_dice_losses_obey_the_triangle_inequality_relaxed_by_three_halves(form, triple):
    a, b, c = triple
    total = dice(a, b, form) + dice(b, c, form)
    assert dice(a, c, form) <= 1.5 * total + 1e-12
    u = jaccard(a, b, form) + jaccard(b, c, form)
    assert dice(a, c, form) <= bound_of_the_proof(u) * total + 1e-12


@both_soft_forms
def test_the_factor_three_halves_cannot_be_smaller(form):
    a, b, c = vector(0, 1), vector(1, 1), vector(1, 0)
    assert dice(a, b, form) == dice(b, c, form) == pytest.approx(1 / 3)
    assert dice(a, c, form) == 1
    assert dice(a, c, form) > 1.49 * (dice(a, b, form) + dice(b, c, form))


@both_soft_forms
def test_the_dice_losses_break_the_plain_triangle_inequality(form):
    a, b, c = vector(0.1, 0.9), vector(0.9, 0.9), vector(0.9, 0.1)
    assert dice(a, c, form) > 1.05 * (dice(a, b, form) + dice(b, c, form))


@law
@given(st.floats(0, 1), st.integers(0, 6))
def test_the_bound_of_the_proof_is_attained_at_every_sum(t, k):
    shared = torch.ones(k, dtype=torch.float64)
    partly_shared = torch.cat([shared, vector(t)])
    for a, b, c in (
        (vector(0, 1), vector(t, t), vector(1, 0)),
        tuple(torch.cat([vector(*ends), partly_shared]) for ends in ((0, 1), (1, 1), (1, 0))),
    ):
        u = jaccard(a, b) + jaccard(b, c)
        ratio = dice(a, c) / (dice(a, b) + dice(b, c))
        assert ratio == pytest.approx(bound_of_the_proof(u), abs=1e-9)


@both_soft_forms
@law
@given(vectors(3, max_size=1))
def test_with_one_voxel_the_dice_losses_are_metrics(form, triple):
    a, b, c = triple
    assert dice(a, c, form) <= dice(a, b, form) + dice(b, c, form) + 1e-12


@both_soft_forms
@law
@given(vectors(3), weight)
def test_weights_kappa_relax_the_inequality_by_one_plus_kappa_over_two_kappa(form, triple, kappa):
    def distance(x: Tensor, y: Tensor) -> float:
        return tversky(x, y, kappa, kappa, form=form)

    rho = max(1, (1 + kappa) / (2 * kappa))
    a, b, c = triple
    assert distance(a, c) <= rho * (distance(a, b) + distance(b, c)) + 1e-12
    a, b, c = vector(0, 1), vector(1, 1), vector(1, 0)
    if kappa <= 1:
        assert distance(a, c) == pytest.approx(rho * (distance(a, b) + distance(b, c)))


def test_the_squared_jaccard_loss_is_not_a_metric():
    a, b, c = vector(1.0), vector(0.5), vector(0.25)
    assert jaccard(a, c, "squared") > 1.03 * (jaccard(a, b, "squared") + jaccard(b, c, "squared"))


# Ties


@st.composite
def tied_pairs(draw: st.DrawFn):
    """Two vectors whose first entries are equal and away from 0 and 1."""
    x, y = draw(vectors(2))
    tie = draw(st.floats(0.1, 0.9))
    return torch.cat([vector(tie), x]), torch.cat([vector(tie), y])


def paper_counts(x: Tensor, y: Tensor, alpha: float, beta: float, form: str) -> tuple[float, float]:
    """tp and alpha fp + beta fn, computed with norms."""
    tp = (l1(x) + l1(y) - l1(x - y)) / 2 if form == "min" else x @ y
    fp, fn = (l1(x) - l1(y) + l1(x - y)) / 2, (l1(y) - l1(x) + l1(x - y)) / 2
    return float(tp), float(alpha * fp + beta * fn)


@both_soft_forms
@law
@given(tied_pairs(), weight, weight)
def test_the_one_sided_derivatives_at_a_tie_have_a_closed_form(form, pair, alpha, beta):
    x, y = pair
    tp, errors = paper_counts(x, y, alpha, beta, form)
    lost = errors if form == "min" else errors * float(y[0])
    gained = 0.0 if form == "min" else errors * float(y[0])
    square = (tp + errors) ** 2
    step = torch.zeros_like(x)
    step[0] = 1e-7
    center = tversky(x, y, alpha, beta, form=form)
    right = (tversky(x + step, y, alpha, beta, form=form) - center) / 1e-7
    left = (center - tversky(x - step, y, alpha, beta, form=form)) / 1e-7
    assert right == pytest.approx((alpha * tp - gained) / square, rel=1e-4, abs=1e-4)
    assert left == pytest.approx(-(beta * tp + lost) / square, rel=1e-4, abs=1e-4)


@law
@given(tied_pairs(), weight, weight)
def test_a_tied_voxel_has_no_gradient_in_the_min_form(pair, alpha, beta):
    assert tversky_gradient(*pair, alpha, beta, "min")[0] == 0


@both_soft_forms
@law
@given(vectors(2), weight, weight)
def test_the_gradient_has_a_closed_form_at_ties_and_elsewhere(form, pair, alpha, beta):
    x, y = pair
    tp, errors = paper_counts(x, y, alpha, beta, form)
    assume(tp + errors > 0)
    above, below = (x > y).double(), (x < y).double()
    expected = alpha * tp * above - beta * tp * below
    expected -= errors * (below if form == "min" else y)
    actual = tversky_gradient(x, y, alpha, beta, form) * (tp + errors) ** 2
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-9)


@law
@given(tied_pairs(), weight, weight)
def test_autograd_of_the_norms_takes_the_mean_of_the_one_sided_derivatives(pair, alpha, beta):
    x, y = pair
    tp, errors = paper_counts(x, y, alpha, beta, "min")
    expected = (alpha * tp - (beta * tp + errors)) / 2 / (tp + errors) ** 2
    tie_gradient = gradient(lambda x: paper_ctl(x, y, alpha, beta), x)[0]
    assert float(tie_gradient) == pytest.approx(expected, abs=1e-12)


@law
@given(vectors(1, voxel=st.floats(1e-3, 1)), weight, weight)
def test_autograd_of_the_norms_is_not_0_at_the_label_when_alpha_and_beta_differ(single, alpha, beta):
    (y,) = single
    expected = torch.full_like(y, (alpha - beta) / (2 * float(l1(y))))
    torch.testing.assert_close(gradient(lambda x: paper_ctl(x, y, alpha, beta), y), expected)
    assert not tversky_gradient(y, y, alpha, beta, "min").any()


# The page itself


def names_of_tests(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {name for name in functions if name.startswith("test_") and not name.startswith("test_the_page_")}


def test_the_page_names_every_test_of_this_file_and_no_other_but_those_of_decisions_and_scores():
    folders = (Path(__file__).parents[1] / name for name in ("decisions", "metrics"))
    others = set().union(*(names_of_tests(path) for each in folders for path in each.glob("test_*.py")))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert names_of_tests(Path(__file__)) <= named <= names_of_tests(Path(__file__)) | others
