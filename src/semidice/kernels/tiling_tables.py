"""Tilings by number of classes, from trials on an H200. A program writes this file:

    python benchmarks/tune_tilings.py --write --classes
        2 3 8 11 14 19 24 32 40 50 64 80 100 130 150 200 300 400 600 1000 2000

A row holds the most classes, the tiling of logits of two bytes, and that of four bytes if it differs. The
numbers of a tiling are voxels, warps, neighbouring voxels per thread, and tiles per program. HARD tables are
for class indices and a softmax: they take fewer registers, and so tiles have more voxels.
"""

from . import MAX_FUSED_CLASSES
from .tilings import BLOCK_GRADIENT, BLOCK_SUMS, Tiling, Tilings

FORWARD: Tilings = (
    (4, Tiling(1024, 4, 4, 4)),
    (10, Tiling(128, 1, 4, 16, num_stages=3), Tiling(64, 1, 4, 16, num_stages=3)),
    (28, Tiling(64, 1, 4, 16, num_stages=3)),
    (32, Tiling(64, 1, 8, 16, num_stages=3), Tiling(32, 1, 4, 16, num_stages=3)),
    (48, Tiling(64, 2, 4, 16, num_stages=3)),
    (80, Tiling(32, 2, 4, 16, num_stages=3)),
    (102, Tiling(32, 2, 4, 16, num_stages=3), Tiling(32, 4, 4, 16, num_stages=3)),
    (160, Tiling(32, 4, 4, 16, num_stages=3)),
    (320, Tiling(32, 8, 4, 16, registers=128)),
    (MAX_FUSED_CLASSES, BLOCK_SUMS),
)
BACKWARD: Tilings = (
    (4, Tiling(1024, 4, 4)),
    (28, Tiling(64, 1, 4)),
    (32, Tiling(64, 1, 8)),
    (48, Tiling(64, 2, 4)),
    (64, Tiling(32, 2, 4), Tiling(64, 2, 4)),
    (102, Tiling(64, 4, 4)),
    (160, Tiling(32, 4, 4), Tiling(64, 4, 8)),
    (320, Tiling(32, 4, 4)),
    (1024, Tiling(16, 8, 4)),
    (MAX_FUSED_CLASSES, BLOCK_GRADIENT),
)
HARD_FORWARD: Tilings = (
    (4, Tiling(1024, 2, 8, 16, num_stages=3, registers=128), Tiling(1024, 4, 4, 4)),
    (10, Tiling(128, 1, 4, 16, num_stages=3)),
    (16, Tiling(128, 1, 4, 16, num_stages=3), Tiling(64, 1, 4, 16, num_stages=3)),
    (24, Tiling(128, 1, 8, 16, num_stages=3), Tiling(64, 1, 4, 16, num_stages=3)),
    (32, Tiling(64, 1, 8, 16, num_stages=3, registers=168), Tiling(64, 1, 4, 16, num_stages=3)),
    (56, Tiling(64, 1, 4, 16, num_stages=3), Tiling(32, 1, 4, 16, num_stages=3)),
    (64, Tiling(64, 1, 8, 16, num_stages=3), Tiling(64, 2, 4, 16, registers=128)),
    (102, Tiling(64, 2, 4, 16, num_stages=3), Tiling(64, 2, 4, 16)),
    (160, Tiling(64, 2, 8, 16, num_stages=3), Tiling(32, 2, 4, 16, num_stages=3)),
    (210, Tiling(64, 4, 4, 16), Tiling(32, 4, 4, 16, registers=168)),
    (320, Tiling(32, 4, 4, 16, registers=168)),
    (512, Tiling(32, 4, 4, 16)),
    (768, BLOCK_SUMS, Tiling(32, 8, 4, 16, registers=128)),
    (1024, BLOCK_SUMS, Tiling(32, 16, 4, 16)),
    (MAX_FUSED_CLASSES, BLOCK_SUMS),
)
HARD_BACKWARD: Tilings = (
    (4, Tiling(1024, 4, 4)),
    (16, Tiling(128, 1, 4)),
    (24, Tiling(128, 1, 4, registers=168)),
    (44, Tiling(64, 1, 4, registers=128), Tiling(64, 1, 4, registers=168)),
    (64, Tiling(64, 2, 4, registers=128)),
    (102, Tiling(64, 2, 4, registers=168), Tiling(64, 4, 8)),
    (160, Tiling(64, 4, 4, registers=128), Tiling(64, 4, 8)),
    (210, Tiling(64, 4, 4, registers=168), Tiling(32, 4, 4)),
    (320, Tiling(32, 4, 4, registers=128), Tiling(32, 4, 4)),
    (440, Tiling(32, 4, 4, registers=168), Tiling(32, 4, 4)),
    (512, Tiling(32, 4, 4)),
    (768, Tiling(32, 8, 4, registers=128), Tiling(16, 8, 4)),
    (1024, Tiling(16, 8, 4), Tiling(32, 16, 4, registers=128)),
    (MAX_FUSED_CLASSES, BLOCK_GRADIENT),
)
