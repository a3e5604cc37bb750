"""semidice: image segmentation with soft labels.

    label = mean_label(masks)                            # raters' masks -> soft label
    loss = SegmentationLoss()                            # 0.25 cross entropy + 0.75 DML1
    total = loss(logits, target)                         # class indices or soft labels

    prob, target --overlap_stats--> tp, fp, fn --tversky_index--> score
    teacher = Teacher(network, calibration="kde")
    total = DistillationLoss()(logits, target, teacher(image, target))

The public names are listed in `semidice.public`. They need only torch, numpy and jaxtyping.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # `semidice --help` must not wait for torch, which takes two seconds to import
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'semidice' has no attribute {name!r}")
    public = import_module("semidice.public")
    globals().update({known: getattr(public, known) for known in ("__all__", *public.__all__)})
    try:
        return globals()[name]
    except KeyError:
        raise AttributeError(f"module 'semidice' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("semidice.public").__all__})
