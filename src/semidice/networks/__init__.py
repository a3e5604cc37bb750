"""Networks and their weights.

models       UNet, DeepLabV3+ and a small UNet, with pretrained weights
checkpoint   weights and optimiser state in a file
systems/     the systems that the paper compares with
"""
