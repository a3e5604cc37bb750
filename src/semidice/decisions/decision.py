"""One rule that turns probabilities into masks, as recipes and commands name it.

argmax           the most probable class, the lowest one at a tie; one channel: more than 1/2
threshold:T      foreground where its probability exceeds T
dice, jaccard    the best expected score, independent voxels
nested           the best expected Dice, raters who differ by one offset
mix:W            the best (1 - W) * dice + W * nested
"""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from jaxtyping import Bool, Float
from torch import Tensor

from .optimal import (
    argmax_mask,
    dice_optimal_mask,
    jaccard_optimal_mask,
    mix_optimal_mask,
    nested_optimal_mask,
    threshold_mask,
)

RULES: dict[str, Callable[..., Tensor]] = {
    "argmax": argmax_mask,
    "threshold": threshold_mask,
    "dice": dice_optimal_mask,
    "jaccard": jaccard_optimal_mask,
    "nested": nested_optimal_mask,
    "mix": mix_optimal_mask,
}
# a parameter of each rule that has one, as messages write it
_PARAMETERS = {"threshold": "T", "mix": "W"}
_KNOWN = ", ".join(f"{rule}:{_PARAMETERS[rule]}" if rule in _PARAMETERS else rule for rule in RULES)


@dataclass(frozen=True)
class Decision:
    """A rule and its parameter: the threshold T or the weight W, from 0 to 1; None for a rule without one."""

    rule: str = "argmax"
    parameter: float | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            close = get_close_matches(self.rule, RULES, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"there is no decision {self.rule!r}; {hint}there are {_KNOWN}")
        letter = _PARAMETERS.get(self.rule)
        if letter is None:
            if self.parameter is not None:
                raise ValueError(
                    f"the decision {self.rule!r} has no parameter; got {self.parameter}: "
                    f"use {self.rule!r} alone"
                )
        elif self.parameter is None:
            raise ValueError(
                f"the decision {self.rule!r} needs a number from 0 to 1, as in '{self.rule}:0.4'; got none"
            )
        elif not 0 <= self.parameter <= 1:
            raise ValueError(
                f"{letter} of the decision '{self.rule}:{letter}' must lie in [0, 1]; got {self.parameter}"
            )

    @classmethod
    def parse(cls, text: str) -> "Decision":
        """The decision of a text such as `dice` or `threshold:0.4`; a ValueError names what is wrong.

        >>> Decision.parse("threshold:0.4"), str(Decision("mix", 0.25))
        (Decision(rule='threshold', parameter=0.4), 'mix:0.25')
        """
        rule, colon, number = text.strip().partition(":")
        if not colon:
            return cls(rule)
        try:
            parameter = float(number)
        except ValueError:
            raise ValueError(
                f"the decision {text!r} needs a number after the colon, as in 'threshold:0.4'; got {number!r}"
            ) from None
        return cls(rule, parameter)

    def __str__(self) -> str:
        return self.rule if self.parameter is None else f"{self.rule}:{self.parameter:g}"

    def masks(
        self, prob: Float[Tensor, "N C *space"], *, valid: Bool[Tensor, "N *space"] | None = None
    ) -> Bool[Tensor, "N C *space"]:
        """The decided masks.

        Several channels are exclusive classes: exactly one of them has each valid voxel. A voxel
        that is not valid is in no mask, and does not change the masks elsewhere.
        """
        parameter = () if self.parameter is None else (self.parameter,)
        return RULES[self.rule](prob, *parameter, valid=valid)
