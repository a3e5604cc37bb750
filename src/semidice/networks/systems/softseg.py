"""SoftSeg (Gros, Lemay & Cohen-Adad, Med Image Anal 2021): soft masks learned by regression.

    prob_c = relu(a_c) / max of relu(a) over the image        c a foreground class
    loss   = adaptive wing loss of prob_c against the soft mask, mean over classes and valid voxels

Published: soft masks stay soft through augmentation, the last activation is a normalised ReLU, the loss is
the adaptive wing loss (Wang et al., ICCV 2019) with the values of its paper: alpha 2.1, omega 14, epsilon 1,
theta 0.5. (omega only scales the loss, as a learning rate does.)
Decided here: the maximum is taken over each image, so a prediction does not depend on the other images of its
batch. The background is one minus the sum of the classes; if this sum exceeds one, the classes are divided by
it. Channel 0 of the network and `loss` of the recipe are not used. The last layer starts with a positive bias
(`start_positive`), because a non-positive output has no gradient. The loss is the mean over voxels, for the
learning rates of sgd; the authors' code adds the voxels up, but uses Adam, which a constant factor does not
change. Every image with a positive output has a voxel of probability one, with or without a lesion.
"""

from jaxtyping import Float, Float32
from torch import Tensor, nn

from ...errors import UserError
from ...losses.segmentation import SegmentationLoss
from ...overlap import sum_across_processes
from .system import System, TrainingLabels

# an image whose maximum is below has no foreground; dividing by less would make gradients overflow
_MIN_MAXIMUM = 1e-6


def normalised_relu(activation: Float[Tensor, "N classes *space"]) -> Float[Tensor, "N classes *space"]:
    """The positive part divided by its maximum in each image; if classes sum to more than 1, by their sum.

    For an image without a positive value, all probabilities and gradients are 0.
    """
    positive = activation.relu()
    highest = positive.amax(tuple(range(1, positive.ndim)), keepdim=True)
    share = positive / highest.clamp_min(_MIN_MAXIMUM)
    return share / share.sum(1, keepdim=True).clamp_min(1)


def adaptive_wing_loss(
    prob: Float[Tensor, "*shape"],
    target: Float[Tensor, "*shape"],
    *,
    alpha: float = 2.1,
    omega: float = 14.0,
    epsilon: float = 1.0,
    theta: float = 0.5,
) -> Float[Tensor, "*shape"]:
    """Adaptive wing loss of each voxel (Wang et al., eq. 3): a logarithm near the target y, then a line.

        omega log(1 + (d / epsilon)^(alpha - y))   for d = |prob - y| < theta, and its tangent at theta beyond

    Value and gradient are continuous at theta; both are 0 at prob = y.

    >>> import torch
    >>> adaptive_wing_loss(torch.tensor([0.3, 1.0]), torch.tensor([0.3, 1.0])).tolist()
    [0.0, 0.0]
    """
    power = alpha - target
    distance = (prob - target).abs()
    edge = (theta / epsilon) ** power
    slope = omega * power * edge / (theta * (1 + edge))
    near = omega * (distance / epsilon).pow(power).log1p()
    far = slope * (distance - theta) + omega * edge.log1p()
    return near.where(distance < theta, far)


def start_positive(network: nn.Module, num_classes: int) -> None:
    """Set the bias of each foreground channel of the last layer to the norm of its weights.

    After a normalisation and a ReLU, features have a mean square of about 1/2. So outputs have a standard
    deviation of about 0.7 norms, most of them start positive, and every image has a gradient. A larger bias
    makes training slower: prob does not change with the scale of the outputs, so a step matters less.
    """
    parameters = [
        (layer.weight.detach(), layer.bias.detach())
        for layer in network.modules()
        if isinstance(layer, nn.Conv2d) and layer.out_channels == num_classes and layer.bias is not None
    ]
    if not parameters:
        raise UserError(
            "system softseg needs a network whose last layer is a convolution with a bias and "
            f"{num_classes} outputs, which must start positive; {type(network).__name__} has none"
        )
    weight, bias = parameters[-1]
    bias[1:] = weight[1:].flatten(1).norm(dim=1)


class SoftSeg(System):
    """A network whose foreground channels are fitted to the soft label by regression."""

    def __init__(self, network: nn.Module, *, num_classes: int) -> None:
        super().__init__()
        self.network = network
        start_positive(network, num_classes)

    def forward(self, image: Float[Tensor, "N channels *space"]) -> Float[Tensor, "N C *space"]:
        """Activations of the last layer."""
        return self.network(image)  # type: ignore[no-any-return]

    def losses(
        self, output: Tensor, labels: TrainingLabels, loss: SegmentationLoss
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean over classes and valid voxels, of all processes together; 0 without a valid voxel."""
        prob = normalised_relu(output[:, 1:].float())
        mean = adaptive_wing_loss(prob, labels.target[:, 1:]).mean(1)
        sums = sum_across_processes(mean.where(labels.valid, 0).sum())
        total = sums / sum_across_processes(labels.valid.sum().float()).clamp_min(1)
        return total, {"adaptive_wing": total.detach()}

    def probability(self, image: Float[Tensor, "N channels *space"]) -> Float32[Tensor, "N C *space"]:
        output = self(image)
        prob = output.float()
        prob[:, 1:] = normalised_relu(output[:, 1:].float())
        prob[:, 0] = 1 - prob[:, 1:].sum(1).clamp_(max=1)
        return prob  # type: ignore[no-any-return]
