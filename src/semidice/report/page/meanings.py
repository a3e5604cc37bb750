"""What each metric says, in one line, for whoever reads the page without the documentation."""

MEANINGS = {
    "dice_score": "overlap of the decided mask with the raters' majority: 2 tp / (2 tp + fp + fn)",
    "iou_score": "overlap of the decided mask with the raters' majority: tp / (tp + fp + fn)",
    "binarized_dice_score": (
        "BDice: Dice of prediction and mean of the raters, both cut at 0.1, 0.2, ... 0.9, averaged"
    ),
    "soft_dice_score": "overlap of the probabilities and the mean of the raters, 1 only where they are equal",
    "calibration_error": (
        "ECE: distance of confidence from accuracy over 10 bins of the top class, against the majority"
    ),
    "rater_calibration_error": "the same, accuracy being the share of raters who agree with the top class",
    "classwise_calibration_error": "the calibration error of each class on its own",
    "kde_calibration_error": "how far probabilities are from what is observed at them, by kernel density",
    "brier_error": "mean squared difference of probabilities and the majority",
    "negative_log_likelihood": "mean of -log of the probability given to the majority's class, in nats",
    "truth_error": "mean distance of the probabilities from the true ones, which are known of phantoms alone",
    "volume_error_ml": "difference of the volumes of the decided mask and of the majority, in ml",
    "hausdorff_error_mm": "95th percentile of the distance between surfaces, in mm",
    "surface_dice_score": "share of the surfaces that lie within a tolerance of each other",
    "generalised_energy_distance": "distance between the masks a prediction allows and those the raters drew",
    "rater_dice_score": "overlap of the decided mask with each rater, averaged over the raters",
}
