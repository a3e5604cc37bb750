"""A rule that turns probabilities into masks, as recipes and commands name it; `masks` applies it.

argmax           the most probable class, the lowest one at a tie; one channel: more than 1/2
threshold:T      foreground where its probability exceeds T
dice, jaccard    the best expected score, if the voxels of a rater are independent
nested           the best expected Dice, if raters differ by one offset: masks {p >= t}, t ~ U(0, 1)
mix:W            the best (1 - W) * dice + W * nested
"""

from dataclasses import dataclass

from ..errors import nearest

# each rule, and the letter of its parameter
RULES = {"argmax": "", "threshold": "T", "dice": "", "jaccard": "", "nested": "", "mix": "W"}
# their masks are constant cuts of the probabilities
PLAIN = ("argmax", "threshold")


@dataclass(frozen=True)
class Decision:
    """A rule and its parameter: the threshold T or the weight W, from 0 to 1; None for a rule without one."""

    rule: str = "argmax"
    parameter: float | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            known = [f"{rule}:{letter}".rstrip(":") for rule, letter in RULES.items()]
            raise ValueError(f"there is no decision {self.rule!r}{nearest(self.rule, known)}")
        letter = RULES[self.rule]
        is_wanted = bool(letter) == (self.parameter is not None)
        if not is_wanted or not 0 <= (self.parameter or 0) <= 1:
            example = f"'{self.rule}:{letter}' with {letter} in [0, 1], as '{self.rule}:0.4'"
            raise ValueError(
                f"the decision {self.rule!r} has the parameter {self.parameter}: use "
                + (example if letter else f"{self.rule!r} alone")
            )

    @classmethod
    def parse(cls, decision: "Decision | str") -> "Decision":
        """The decision of a text such as `dice` or `threshold:0.4`; a ValueError names what is wrong.

        >>> Decision.parse("threshold:0.4"), str(Decision("mix", 0.25))
        (Decision(rule='threshold', parameter=0.4), 'mix:0.25')
        """
        if isinstance(decision, Decision):
            return decision
        if not isinstance(decision, str):
            raise ValueError(f"a decision is a text such as 'dice' or 'threshold:0.4'; got {decision!r}")
        rule, colon, number = decision.strip().partition(":")
        if not colon:
            return cls(rule)
        try:
            parameter = float(number)
        except ValueError:
            raise ValueError(
                f"the decision {decision!r} needs a number after the colon, as in 'threshold:0.4'"
            ) from None
        return cls(rule, parameter)

    def __str__(self) -> str:
        return self.rule if self.parameter is None else f"{self.rule}:{self.parameter:g}"
