"""What an optimal mask maximises: an expected score under one coupling, or a mix of two."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .expected import expected_dice, expected_jaccard, expected_nested_dice


class Objective(NamedTuple):
    """The expected score of a rule: dice, jaccard, nested or mix. weight: the share of nested in a mix."""

    name: str
    weight: float = 0.0

    def mixture(self, independent: Callable[[], Tensor], nested: Callable[[], Tensor]) -> Tensor:
        """(1 - weight) independent + weight nested; a part without weight is not computed."""
        weight = {"dice": 0.0, "nested": 1.0}.get(self.name, self.weight)
        if weight in (0, 1):
            return nested() if weight else independent()
        return (1 - weight) * independent() + weight * nested()

    def expected(self, p: Tensor, mask: Tensor, *, exact: bool) -> Tensor:
        """Expected score of any masks (R, n), (R,) float64."""
        if self.name == "jaccard":
            return expected_jaccard(p, mask, exact=exact)
        return self.mixture(
            lambda: expected_dice(p, mask, exact=exact),
            lambda: expected_nested_dice(p, mask, exact=exact),
        )
