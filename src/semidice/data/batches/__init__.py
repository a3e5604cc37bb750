"""From a prepared dataset to the batches of a training, made on the device.

storage        all cases in the memory of a device, or read from files
label_making   labels of a batch by the votes of the raters
augment        one resampling grid for image and label, then intensities
feed           what a step sends to the device, the batch made of it, and whole cases
"""
