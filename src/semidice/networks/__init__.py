"""Networks and their weights.

build        a network by name: those of segmentation_models_pytorch, and small_unet
small_unet   a small UNet without pretraining
pretrained   weights of an encoder, from a file or the hub
checkpoint   weights and optimiser state in a file
predictor    class probabilities of batches and of whole cases
windows      the same for images of any size, in overlapping windows
systems/     the systems that the paper compares with
"""
