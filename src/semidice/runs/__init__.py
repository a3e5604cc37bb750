"""Opening a run folder and scoring it.

    run                an opened run: recipe, facts of its dataset, networks
    start              creating a run folder, or continuing it
    stamp              which predictions a fold has
    predictions        stored probabilities of a case, within 1/65535
    prediction_files   masks and probabilities in files of other tools
    scoring            the case table of predictions of any origin
    held_out           stored predictions of a run's folds; fits across folds
    fits               fits.json: what was fitted, to which predictions
    evaluate           `semidice evaluate`, with `rules` that make masks and `volumes` with intervals
    calibration        `semidice calibrate`

Scores are computed from stored predictions, never directly from the output of a network, but in validation.
"""
