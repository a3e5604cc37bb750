"""`semidice predict`: probabilities of new files.

inputs    files to predict, prepared as the dataset of the run was
windows   images of any size, whole or in overlapping windows
outputs   probability maps and masks on the grid of the input, and volumes
command   the command itself
"""
