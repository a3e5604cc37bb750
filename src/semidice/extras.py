"""Which extra of semidice installs a package of another project, and a message if it is missing or too old.

The lowest allowed versions are those of `pyproject.toml`, read from the installed metadata of semidice.
"""

import importlib.util
from importlib import metadata

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
# where a package is installed under another name
_DISTRIBUTIONS = {"mlflow": "mlflow-skinny"}


def missing_message(package: str) -> str:
    """What to do if `package` cannot be imported.

    >>> missing_message("monai.metrics")
    "needs monai; run: pip install 'semidice[monai]'"
    """
    package = package.partition(".")[0]
    return f"needs {package}; run: pip install 'semidice[{_EXTRA_OF_PACKAGE.get(package, 'train')}]'"


def need(package: str, user: str) -> None:
    """An ImportError of one line if `package` is missing or older than `pyproject.toml` allows.

    user: what needs the package, such as "semidice.integrations.lightning".
    """
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{user} {missing_message(package)}", name=package)
    # packaging comes with every extra; the core does not need it
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    extra = _EXTRA_OF_PACKAGE[package]
    distribution = canonicalize_name(_DISTRIBUTIONS.get(package, package))
    for text in metadata.requires("semidice") or ():
        required = Requirement(text)
        if canonicalize_name(required.name) != distribution:
            continue
        if required.marker is not None and not required.marker.evaluate({"extra": extra}):
            continue
        version = metadata.version(distribution)
        if not required.specifier.contains(version, prereleases=True):
            raise ImportError(
                f"{user} needs {package}{required.specifier}, and {version} is installed; run: "
                f"pip install --upgrade 'semidice[{extra}]'"
            )
