"""The DFlash drafter: a small block-diffusion network conditioned on the target's hidden states."""

from dflash_mlx.drafter.drafter import Draft, Drafter
from dflash_mlx.drafter.load import load_drafter
from dflash_mlx.drafter.model import DrafterModel, Embed, Head

__all__ = ["Draft", "Drafter", "DrafterModel", "Embed", "Head", "load_drafter"]
