"""A run folder opened.

    run           recipe, facts of its dataset, and the networks of its folds
    predictions   stored probabilities of a case, within 1/65535
    scoring       the case table of a fold, from its stored predictions
    evaluate      `semidice evaluate`

Scores are made from what is stored, never directly from a network's output.
"""
