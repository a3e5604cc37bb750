"""semidice: image segmentation with soft labels.

    label = mean_label(masks)                            # raters' masks -> soft label
    loss = SegmentationLoss()                            # 0.25 cross entropy + 0.75 DML1
    total = loss(logits, target)                         # class indices or soft labels

    prob, target --overlap_stats--> tp, fp, fn --tversky_index--> score
    teacher = Teacher(network, TeacherCalibration("kde"))
    total = DistillationLoss()(logits, target, teacher(image, target))

The public names are those in `__all__` of the packages below. They need only torch, numpy and
jaxtyping; fitting a calibrator takes scipy, and storing one safetensors, which are installed with them.
"""

from typing import TYPE_CHECKING

from .lazy import lazy_names

if TYPE_CHECKING:
    from .calibration import *  # noqa: F403
    from .kernels import *  # noqa: F403
    from .labels import *  # noqa: F403
    from .losses import *  # noqa: F403
    from .overlap import *  # noqa: F403

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(__name__, ("calibration", "kernels", "labels", "losses", "overlap"))
