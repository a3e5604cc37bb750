"""`semidice predict`: probabilities of new files.

inputs    files to predict, prepared like the dataset of the run
windows   images of any size, as a whole or in overlapping windows
outputs   probability maps and masks on the grid of the input, and volumes
command   the command itself
"""
