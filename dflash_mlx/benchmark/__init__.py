"""`python -m dflash_mlx.benchmark`: plain against speculative decoding, so that the result cannot flatter."""
