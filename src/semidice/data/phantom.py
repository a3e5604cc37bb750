"""CT-like slices with ambiguous lesions: images, raters' masks, and the probability behind the masks.

A structure k (an organ, or a lesion in it) has a star-shaped outline. In direction θ, rater r of case n draws
the outline displaced outwards by

    f(θ) (bias b_rk + offset e_nrk + wobble W_nrk(θ)),      b, e, W(θ) ~ N(0, 1) independent.

f is the fuzziness of the edge; b is the same in every case. With probability m_nk the rater does not draw a
lesion at all. With d the distance inwards from the outline, the chance that k is drawn at a voxel is

    q_k = (1 - m_nk) Φ(d / (f(θ) s)),      s² = bias² + offset² + wobble².

Later structures are painted over earlier ones, so p*(class k) = q_k Π_{j>k} (1 - q_j). p* holds for the given
scene: outlines, fuzziness, contrast. The image is a noisy view of the scene, with edges Φ(d / (f(θ) s)).
Left out: cases without a lesion, volumes, and raters of different populations.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from ..errors import UserError
from ..options import Weight, check_value

# lengths are in pixels of an image whose shorter side has this many, and scale with the image
_REFERENCE_SIDE = 64
_CONTRAST = (0.1, 0.3)
_NUM_HARMONICS = 4


@dataclass(frozen=True)
class Phantom:
    """Images of a phantom, the true class probabilities, and the mask of each rater.

    prob: the probability that a random rater of this population gives a voxel each class.
    masks: bool for two classes, class maps for more.
    """

    image: Float32[Tensor, "N 1 H W"]
    prob: Float32[Tensor, "N C H W"]
    masks: Bool[Tensor, "N R H W"] | Int64[Tensor, "N R H W"]


@dataclass(frozen=True)
class PhantomOptions:
    """Options of a phantom, with their defaults.

    num_classes: 2 is a lesion (1) in an organ that is not labelled; with more, 1 is the organ and 2, 3, ...
    are lesions.
    bias, offset, wobble: standard deviations of a rater's habit, of the whole outline in one case, and of
    its local course, in pixels if the shorter side has 64. If all are 0, every rater draws the same outline.
    miss: mean probability to overlook a lesion, at most 0.5. In a case it falls linearly from twice this
    value at the lowest contrast to 0 at the highest. No rater overlooks the organ.
    noise: standard deviation of the noise of a pixel.
    """

    num_cases: int = 60
    size: Sequence[int] = (64, 64)
    num_raters: int = 4
    num_classes: int = 2
    seed: int = 0
    bias: float = 0.8
    offset: float = 0.6
    wobble: float = 0.7
    miss: float = 0.05
    noise: float = 0.04

    def __post_init__(self) -> None:
        for name, least in (("num_cases", 1), ("num_raters", 1), ("num_classes", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} must be {least} or more; got {getattr(self, name)}")
        if len(self.size) != 2 or min(self.size) < 8:
            raise UserError(f"size must be (height, width), each 8 pixels or more; got {tuple(self.size)}")
        if not 0 <= self.miss <= 0.5:
            raise UserError(
                f"miss must be from 0 to 0.5, as faint lesions are missed twice as often; got {self.miss}"
            )
        check_value(Weight, bias=self.bias, offset=self.offset, wobble=self.wobble, noise=self.noise)

    def make_case(self, number: int) -> Phantom:
        """Case `number` alone, with a case axis of length 1: the same bits as in the whole phantom."""
        return _make(self, [number])


def make_phantom(num_cases: int, **options: Any) -> Phantom:
    """Images in about [0, 1], true class probabilities and raters' masks of `num_cases` slices.

    options: those of `PhantomOptions`. The same seed gives the same bits. More cases do not change the first
    ones. Images and probabilities do not depend on the number of raters or on their masks.

    >>> phantom = make_phantom(3, size=(32, 48), num_raters=5)
    >>> tuple(phantom.image.shape), tuple(phantom.prob.shape), tuple(phantom.masks.shape)
    ((3, 1, 32, 48), (3, 2, 32, 48), (3, 5, 32, 48))
    """
    return _make(PhantomOptions(num_cases, **options), range(num_cases))


def _make(options: PhantomOptions, cases: Iterable[int]) -> Phantom:
    num_structures, seed = max(2, options.num_classes - 1), options.seed
    habit = np.random.default_rng((seed, 0)).standard_normal((options.num_raters, num_structures))
    spread = np.hypot(np.hypot(options.bias, options.offset), options.wobble)
    images, probs, masks = [], [], []
    for case in cases:
        of_scene, of_noise, of_raters = (np.random.default_rng((seed, use, case)) for use in (1, 2, 3))
        scene = _Scene(of_scene, options.size, num_structures, spread=spread)
        images.append(scene.image + options.noise * of_noise.standard_normal(scene.image.shape))
        missed = scene.miss_probability(options.miss)
        drawn = _drawn(scene, of_raters, habit, missed, options)
        seen = scene.edge * (1 - missed)[:, None, None]
        if options.num_classes == 2:
            # the organ is in the image, but nobody labels it
            seen, drawn = seen[1:], drawn[:, 1:]
        # structures are painted one after the other, each over the earlier ones
        prob = np.ones((1, *options.size))
        for chance in seen:
            prob = np.concatenate([prob * (1 - chance), chance[None]])
        probs.append(prob)
        masks.append((drawn * np.arange(1, len(seen) + 1)[:, None, None]).max(axis=1))
    classes = torch.from_numpy(np.stack(masks))
    return Phantom(
        image=torch.from_numpy(np.stack(images)[:, None]).float(),
        prob=torch.from_numpy(np.stack(probs)).float(),
        masks=classes.bool() if options.num_classes == 2 else classes,
    )


class _Scene:
    """One case without raters: level, fuzziness and edge of each structure, the organ first."""

    def __init__(
        self, rng: np.random.Generator, size: Sequence[int], num_structures: int, *, spread: float
    ) -> None:
        height, width = size
        side = min(height, width)
        self.scale = side / _REFERENCE_SIDE
        rows, columns = np.mgrid[:height, :width] + 0.5
        organ_radius = rng.uniform(0.32, 0.4) * side
        centre = np.array([height, width]) / 2 + rng.uniform(-0.06, 0.06, 2) * side
        levels, angles, fuzziness = [], [], []
        for structure in range(num_structures):
            radius, middle = organ_radius, centre
            if structure > 0:
                radius = organ_radius * rng.uniform(0.25, 0.5)
                away, direction = rng.uniform(0, 0.5) * organ_radius, rng.uniform(0, 2 * np.pi)
                middle = centre + away * np.array([np.sin(direction), np.cos(direction)])
            down, right = rows - middle[0], columns - middle[1]
            angle = np.arctan2(down, right)
            levels.append(radius * _outline(rng, angle) - np.hypot(down, right))
            angles.append(angle)
            # an outline is sharper on one side than on the other
            fuzziness.append(rng.uniform(0.6, 1.4) * (1 + 0.5 * np.cos(angle + rng.uniform(0, 2 * np.pi))))
        self.level, self.angle = np.stack(levels), np.stack(angles)
        self.fuzziness = np.stack(fuzziness) * self.scale
        # without spread the edge is a step, not 0 / 0
        ratio = self.level / np.maximum(self.fuzziness * spread, 1e-9)
        self.edge: np.ndarray = torch.special.ndtr(torch.from_numpy(ratio)).numpy()
        self.contrast = rng.uniform(*_CONTRAST, num_structures)
        self.image = self._render()

    def _render(self) -> Float[np.ndarray, "H W"]:
        """Grey values without noise: a bright organ with lesions that are darker and brighter in turn."""
        image: np.ndarray = 0.2 + 0.3 * self.edge[0]
        for structure in range(1, len(self.edge)):
            sign = -1 if structure % 2 else 1
            grey = 0.5 + sign * self.contrast[structure] * (1 + 0.5 * ((structure - 1) // 2))
            image = image + self.edge[structure] * (grey - image)
        return image

    def miss_probability(self, miss: float) -> Float[np.ndarray, " structures"]:
        """Probability that a rater overlooks each structure: higher for faint lesions, 0 for the organ."""
        low, high = _CONTRAST
        missed = 2 * miss * (high - self.contrast) / (high - low)
        missed[0] = 0
        return missed


def _drawn(
    scene: _Scene,
    rng: np.random.Generator,
    habit: Float[np.ndarray, "R structures"],
    missed: Float[np.ndarray, " structures"],
    options: PhantomOptions,
) -> Bool[np.ndarray, "R structures H W"]:
    """Where each rater draws each structure."""
    num_raters, num_structures = habit.shape
    drawn = np.empty((num_raters, *scene.level.shape), dtype=bool)
    for structure in range(num_structures):
        angle = scene.angle[structure]
        common = options.bias * habit[:, structure] + options.offset * rng.standard_normal(num_raters)
        # a cos(kθ) + b sin(kθ) with a, b ~ N(0, 1/K) and K orders: variance 1 at every θ
        orders = np.arange(1, _NUM_HARMONICS + 1)[:, None, None] * angle
        waves = np.concatenate([np.cos(orders), np.sin(orders)]) / np.sqrt(_NUM_HARMONICS)
        local = np.tensordot(rng.standard_normal((num_raters, len(waves))), waves, axes=1)
        displaced = scene.fuzziness[structure] * (common[:, None, None] + options.wobble * local)
        sees = rng.random(num_raters) >= missed[structure]
        drawn[:, structure] = (scene.level[structure] + displaced > 0) & sees[:, None, None]
    return drawn


def _outline(rng: np.random.Generator, angle: Float[np.ndarray, "H W"]) -> Float[np.ndarray, "H W"]:
    """Radius in each direction relative to the mean radius: like an ellipse, with smaller dents."""
    radius = np.ones_like(angle)
    for order, size in ((2, 0.2), (3, 0.08), (4, 0.05)):
        radius += rng.uniform(0, size) * np.cos(order * angle + rng.uniform(0, 2 * np.pi))
    return radius
