"""Which extra of semidice installs a package of another project, and a message if it is missing.

Versions are those that pip has resolved.
"""

import importlib.util

from .errors import UserError


class ExtraError(ImportError, UserError):
    """A package of another project is missing."""


# packages of the extra `train` are not listed: an unknown package belongs to it
_EXTRA_OF_PACKAGE = {
    "accelerate": "huggingface",
    "highdicom": "dicom",
    "huggingface_hub": "huggingface",
    "lightning": "lightning",
    "mlflow": "mlflow",
    "monai": "monai",
    "nnunetv2": "nnunet",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "pydicom": "dicom",
    "ray": "ray",
    "transformers": "huggingface",
    "wandb": "wandb",
}


def missing_message(package: str) -> str:
    """What to do if `package` cannot be imported.

    >>> missing_message("monai.metrics")
    "needs monai; run: pip install 'semidice[monai]'"
    """
    package = package.partition(".")[0]
    return f"needs {package}; run: pip install 'semidice[{_EXTRA_OF_PACKAGE.get(package, 'train')}]'"


def need(package: str, user: str) -> None:
    """An ExtraError of one line if `package` is missing.

    user: what needs the package, such as "semidice.integrations.lightning".
    """
    if importlib.util.find_spec(package) is None:
        raise ExtraError(f"{user} {missing_message(package)}", name=package)
