"""What the routes share: the engine, and how this server was started."""

from dataclasses import dataclass

from dflash_mlx.server.engine import Engine


@dataclass(frozen=True)
class Service:
    """One running server.

    Attributes:
        model, drafter: names of the loaded pair.
        base_url: what clients are to be configured with.
        strict_model: refuse requests that name another model.
        heartbeat: seconds of silence after which a stream says that it is alive.
    """

    engine: Engine
    model: str
    drafter: str | None
    base_url: str
    strict_model: bool = False
    heartbeat: float = 8.0
    created: int = 0
