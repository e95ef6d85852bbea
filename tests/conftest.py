"""Devices, seeds and threads of the tests.

Inputs are fresh in each session: the seed is drawn, shown in the header and set again through SYNCFREE_SEED. What a
test draws depends on that seed and on the test's own name only, not on which tests ran before it.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
from collections.abc import Callable, Generator, Iterator

import pytest
import torch

from gpu_turn import turn
from ranks import Ranks

_SEED = "SYNCFREE_SEED"
# Turns "no GPU" from a skip into a failure.
_REQUIRE_CUDA = "SYNCFREE_FAIL_WITHOUT_CUDA"
# K/N: every N-th of the tests that are selected, from the K-th on.
_PIECE = "SYNCFREE_PIECE"


def _cuda_is_required() -> bool:
    return os.environ.get(_REQUIRE_CUDA, "0") not in ("", "0")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs a CUDA device")
    config.addinivalue_line("markers", "alone: measures the GPU, and has it to itself among the tests that use it")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "waits_often: takes long on a GPU that others use too, each wait for its turn")
    # In the environment, so that the workers of pytest-xdist take the controller's.
    os.environ.setdefault(_SEED, str(random.SystemRandom().randrange(2**31)))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = int(os.environ.get("SYNCFREE_TEST_THREADS", (os.cpu_count() or 1) // workers))
    torch.set_num_threads(max(1, min(4, threads)))


def pytest_report_header() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return f"syncfree: {_SEED}={os.environ[_SEED]}, torch {torch.__version__}, CUDA device: {device}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take `device` run on the CPU, and on the GPU too where there is one or there ought to be one."""
    if "device" not in metafunc.fixturenames or metafunc.definition.get_closest_marker("cuda"):
        return
    if any("device" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")):
        return  # the test names its devices itself
    devices = ["cpu"]
    if torch.cuda.is_available() or _cuda_is_required():
        devices.append(pytest.param("cuda", marks=pytest.mark.cuda))
    metafunc.parametrize("device", devices, indirect=True)


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a GPU what takes long comes first, what wants it alone last: who waits to be alone keeps all others out."""
    if _PIECE in os.environ:
        piece, _, pieces = os.environ[_PIECE].partition("/")
        if not (piece.isdecimal() and pieces.isdecimal() and 1 <= int(piece) <= int(pieces)):
            raise pytest.UsageError(f"{_PIECE} must be K/N with 1 <= K <= N, got {os.environ[_PIECE]}")
        kept = items[int(piece) - 1 :: int(pieces)]
        ids = {item.nodeid for item in kept}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in ids])
        items[:] = kept

    def order(item: pytest.Item) -> tuple[bool, bool]:
        marks = {mark.name for mark in item.iter_markers()}
        return "alone" in marks, marks.isdisjoint({"slow", "waits_often"})

    if torch.cuda.is_available():
        items.sort(key=order)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """On the GPU tests run side by side, in the processes of pytest-xdist, but those that measure it run alone."""
    if item.get_closest_marker("cuda") is None or not torch.cuda.is_available():
        return (yield)
    with turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        if _cuda_is_required():
            pytest.fail("a CUDA device is required here, and torch finds none", pytrace=False)
        pytest.skip("no CUDA device")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device under test. Tests marked cuda as a whole get the GPU alone."""
    name = getattr(request, "param", "cuda")
    yield torch.device(name, 0) if name == "cuda" else torch.device(name)
    if name == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A CPU generator for this test: the same inputs on every device, others in every session."""
    name = request.node.name.replace("cuda", "device").replace("cpu", "device")
    digest = hashlib.sha256(f"{os.environ[_SEED]} {request.node.path.name} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


@pytest.fixture(scope="session")
def rank_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, str], Ranks]]:
    """Groups of processes by size and backend, started when first asked for, and anew after a failure."""
    pools: dict[tuple[int, str], Ranks] = {}

    def pool(size: int, backend: str) -> Ranks:
        if (size, backend) not in pools or not pools[size, backend].alive:
            pools[size, backend] = Ranks(size, backend, tmp_path_factory.mktemp("store") / "file")
        return pools[size, backend]

    yield pool
    for ranks in pools.values():
        if ranks.alive:
            ranks.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, rank_pools: Callable[[int, str], Ranks]) -> Ranks:
    """Ranks over gloo on the CPU; their number is the parameter, 2 by default."""
    return rank_pools(getattr(request, "param", 2), "gloo")
