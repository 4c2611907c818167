"""One server for all that needs a real one: loading a pair takes longer than any of these tests."""

from collections.abc import Iterator

import pytest

from server.live import Live, running


@pytest.fixture(scope="session")
def shared() -> Iterator[Live]:
    with running() as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    shared.session.watch(pause=0)
    yield shared
    shared.session.watch(pause=0)
    shared.idle()
