"""The terminal chat: a client of the engine's HTTP endpoint.

It never loads MLX: of `dflash_mlx` it imports `errors`, `events` and `config`, nothing else.
"""
