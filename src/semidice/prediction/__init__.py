"""`semidice predict`: probabilities of new files.

options   options of the command
inputs    files to predict, prepared like the dataset of the run
outputs   probability maps and masks on the grid of the input, and volumes
command   the command itself
"""
