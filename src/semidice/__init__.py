"""semidice: image segmentation with soft labels.

    label = mean_label(masks)                            # raters' masks -> soft label
    loss = SegmentationLoss()                            # 0.25 cross entropy + 0.75 DML1
    total = loss(logits, target)                         # class indices or soft labels

    prob, target --overlap_stats--> tp, fp, fn --tversky_index--> score
    teacher = Teacher(network, calibration="kde")
    total = DistillationLoss()(logits, target, teacher(image, target))

The public names are those in `__all__` of the rooms below. They need only torch, numpy and jaxtyping.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arrays import *  # noqa: F403
    from .calibration import *  # noqa: F403
    from .kernels import *  # noqa: F403
    from .labels import *  # noqa: F403
    from .losses import *  # noqa: F403
    from .overlap import *  # noqa: F403

__version__ = "0.1.0"

_PUBLIC_ROOMS = ("arrays", "calibration", "kernels", "labels", "losses", "overlap")


def __getattr__(name: str) -> Any:
    # torch takes two seconds to import: `semidice --help` must not wait for it
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'semidice' has no attribute {name!r}")
    rooms = [import_module(f"semidice.{room}") for room in _PUBLIC_ROOMS]
    names = {public: getattr(room, public) for room in rooms for public in room.__all__}
    globals().update(names, __all__=sorted(names))
    try:
        return globals()[name]
    except KeyError:
        raise AttributeError(f"module 'semidice' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
