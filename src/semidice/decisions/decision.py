"""One rule that turns probabilities into masks, as recipes and commands name it.

argmax           the most probable class, the lowest one at a tie; one channel: more than 1/2
threshold:T      foreground where its probability exceeds T
"""

from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Bool, Float
from torch import Tensor

from .masks import decide

RuleName = Literal["argmax", "threshold"]
_WITH_PARAMETER = ("threshold",)


@dataclass(frozen=True)
class Decision:
    """A rule and its parameter, such as the threshold; None for a rule without one."""

    rule: RuleName = "argmax"
    parameter: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Decision":
        """The decision of a text such as `argmax` or `threshold:0.4`; a ValueError names what is wrong.

        >>> Decision.parse("threshold:0.4"), str(Decision("threshold", 0.4))
        (Decision(rule='threshold', parameter=0.4), 'threshold:0.4')
        """
        rule, _, parameter = text.partition(":")
        if rule not in get_args(RuleName) or (rule in _WITH_PARAMETER) != bool(parameter):
            raise ValueError(f"there is no decision {text!r}; there are argmax and threshold:T")
        return cls(rule, float(parameter) if parameter else None)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return self.rule if self.parameter is None else f"{self.rule}:{self.parameter:g}"

    def masks(
        self, prob: Float[Tensor, "N C *space"], *, valid: Bool[Tensor, "N *space"] | None = None
    ) -> Bool[Tensor, "N C *space"]:
        """The decided masks. Several channels are exclusive classes: exactly one of them has each voxel."""
        if self.parameter is None:
            return decide(prob).bool()
        return decide(prob, decision="threshold", threshold=self.parameter).bool()
