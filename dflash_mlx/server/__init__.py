"""The OpenAI-compatible endpoint: `python -m dflash_mlx.server`.

The asyncio side translates, queues and frames, and never touches MLX; one thread owns the model.
"""
