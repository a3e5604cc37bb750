"""From a trained run to probabilities, and from stored probabilities to scores.

    stored      probabilities of a case in a file, within 1/65535
    networks    a run folder opened: recipe, facts of its dataset, networks of its folds
    windows     images of any size, whole or in overlapping windows
    scoring     the case table of a fold from its stored predictions
    inputs      files to predict, prepared as the run's dataset was
    outputs     probability maps and masks on the grid of the input, volumes
    evaluate    `semidice evaluate`
    command     `semidice predict`

Scores are made from what is stored, never from a network's answer on its way there.
"""

from .command import run_predict
from .evaluate import run_evaluate
from .networks import (
    DatasetFacts,
    TrainedRun,
    load_network,
    network_probability,
    read_run,
    write_dataset_facts,
)
from .scoring import TRUTH_SCORES, inapplicable_metrics, score_fold
from .stored import read_prediction, write_prediction
from .windows import padded_probability, windowed_probability

__all__ = [
    "TRUTH_SCORES",
    "DatasetFacts",
    "TrainedRun",
    "inapplicable_metrics",
    "load_network",
    "network_probability",
    "padded_probability",
    "read_prediction",
    "read_run",
    "run_evaluate",
    "run_predict",
    "score_fold",
    "windowed_probability",
    "write_dataset_facts",
    "write_prediction",
]
