"""Opening a run folder and scoring it.

    run                an opened run: recipe, facts of its dataset, networks
    predictions        stored probabilities of a case, within 1/65535
    prediction_files   masks and probabilities in files of other tools
    scoring            the case table of a fold from its stored predictions, or of files
    decisions          rules that make masks, fitted and scored across folds
    intervals          volumes of the held-out cases, with intervals
    decision_file      decision.json: what was fitted, to which predictions
    evaluate, decide   `semidice evaluate`

Scores are computed from stored predictions, never directly from the output of a network.
"""
