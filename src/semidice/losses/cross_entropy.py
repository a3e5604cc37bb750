"""Cross entropy of hard and soft targets in one definition, exact over ignored voxels and over processes.

    -sum_c w_c y_c log p_c  /  sum_c w_c y_c      both sums over the valid voxels as well

Left out: label smoothing and other changes of the target (`labels`).
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from ..arrays import Activation, check_prediction, check_result, check_target, class_weights
from ..kernels import segmentation_sums
from ..overlap.mixture import check_entropy, cross_entropy_of
from ..overlap.options import SumsOptions


def soft_cross_entropy(
    prediction: Tensor,
    target: Tensor,
    *,
    activation: Activation = "none",
    valid: Tensor | None = None,
    ignore_index: int | None = None,
    class_weight: Sequence[float] | Tensor | None = None,
    sync: bool = False,
) -> Float[Tensor, ""]:
    """Mean cross entropy over the valid voxels, of hard or soft targets alike, in nats.

    softmax and none: the sum of -w_c y_c log p_c over voxels and classes, divided by that of w_c y_c, so
    that class indices and their one-hot label give the same number. sigmoid: the binary cross entropy of
    each channel, averaged over channels with weights w_c. Without a valid voxel it is 0.

    >>> round(float(soft_cross_entropy(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.5, 0.5]]))), 4)
    0.6931
    """
    check_prediction(prediction, activation)
    target, valid = check_target(
        prediction, target, activation=activation, valid=valid, ignore_index=ignore_index
    )
    check_entropy(prediction, activation)
    sums = segmentation_sums(prediction, target, valid, SumsOptions(activation, form=None, entropy=True))
    return check_result(cross_entropy_of(sums, class_weights(class_weight, prediction), sync), prediction)
