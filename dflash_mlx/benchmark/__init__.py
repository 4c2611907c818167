"""`python -m dflash_mlx.benchmark`: plain against speculative decoding, so that the result cannot flatter."""

from dflash_mlx.benchmark.command import parser

__all__ = ["parser"]
