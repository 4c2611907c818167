"""Metal kernels, one per file with its math, shapes and limits, and their launchers.

Knows arrays only, nothing of models or of decoding; `dflash_mlx.kernels` alone imports it.
"""
