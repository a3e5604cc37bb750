"""Opening a run folder and scoring it.

    run                an opened run: recipe, facts of its dataset, networks
    predictions        stored probabilities of a case, within 1/65535
    prediction_files   masks and probabilities in files of other tools
    scoring            the case table of a fold from its stored predictions, or of files
    evaluate           `semidice evaluate`

Scores are computed from stored predictions, never directly from the output of a network.
"""
