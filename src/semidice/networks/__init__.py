"""Networks and their weights.

build        a network by name: those of segmentation_models_pytorch, and small_unet
small_unet   a small UNet without pretraining
pretrained   weights of an encoder, from a file or the hub
checkpoint   weights and optimiser state in a file
systems/     the systems that the paper compares with
"""
