"""`python -m dflash_mlx.benchmark`: measurements that anyone can repeat."""
