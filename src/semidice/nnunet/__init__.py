"""nnU-Net with several raters: a trainer that nnU-Net finds by itself, and the way to it and back.

    prepared dataset --export--> nnUNet_raw, raters in ratersTr --preprocess--> nnUNet_preprocessed
        --train--> nnUNet_results, probabilities of held-out cases --collect--> run folder of semidice

nnU-Net is not changed. It configures, augments, trains and predicts; semidice gives it the raters' masks, the
label and the loss. `folders` and `options` know names and options, `trainer` is the only module that imports
nnU-Net when it is imported.
"""
