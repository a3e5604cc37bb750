"""Opening a run folder and scoring it.

    run           an opened run: recipe, facts of its dataset, networks
    predictions   stored probabilities of a case, within 1/65535
    scoring       the case table of a fold from its stored predictions
    evaluate      `semidice evaluate`

Scores are computed from stored predictions, never directly from the output of a network.
"""
