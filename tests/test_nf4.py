"""The 4-bit product: the kernel's own source, run thread by thread on the CPU, and on a GPU where there is one."""

import copy
import ctypes
import dataclasses
import math
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bitsandbytes import matmul_4bit
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from hypothesis import example, given, settings
from hypothesis import strategies as st

from colab_kit import nf4, nf4_variants, nvrtc, products
from colab_kit.nf4_variants import AMPERE, HOPPER, Variant

FAST = Variant(1, 1, 8, 2)
FEW = settings(max_examples=12, deadline=None)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = (torch.bfloat16, torch.float16)


def quantized(shard_rows, k, seed, device="cpu", quant_type="nf4", nested=False):
    """As vLLM holds it: the shards' packed rows in one tensor, a state each."""
    generator = torch.Generator().manual_seed(seed)
    parts, states = [], []
    for rows in shard_rows:
        values = torch.randn(rows, k, generator=generator).to(device)
        options = {"quant_type": quant_type, "compress_statistics": nested}
        packed, state = quantize_4bit(values, blocksize=64, quant_storage=torch.uint8, **options)
        parts.append(packed)
        states.append(state)
    return torch.cat(parts), states


def exact(packed, states, x, absolute=False):
    """The product of the dequantized weights (or of their and x's absolute values) in float64."""
    out, at = [], 0
    for state in states:
        size = state.shape[0] * state.shape[1] // 2
        wide = copy.copy(state)
        wide.dtype = torch.float32
        rows = dequantize_4bit(packed[at : at + size], wide)
        rows, wide_x = rows.double(), x.double()
        out.append(wide_x.abs() @ rows.abs().T if absolute else wide_x @ rows.T)
        at += size
    return torch.cat(out, dim=1)


def assert_right(result, packed, states, x, update=0, wide=0):
    """No element is off by more than the table's rounding, its own and that of an adapter's `updates` can explain."""
    unit = 2**-8 if x.dtype == torch.bfloat16 else 2**-11
    truth = exact(packed, states, x) + update
    slack = unit * (truth.abs() + exact(packed, states, x, absolute=True) / 2 + wide) + 1e-6
    assert ((result.double() - truth).abs() <= slack).all()


def all_variants():
    return list(dict.fromkeys(v for lists in (AMPERE, HOPPER) for some in lists.values() for v in some))


def off(result, truth):
    return ((result.double() - truth).norm() / truth.norm()).item()


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """launch(variant) -> nf4.cu compiled for this CPU."""
    if not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    folder, found = tmp_path_factory.mktemp("nf4"), {}

    def build(variant):
        if variant not in found:
            library = folder / f"{len(found)}.so"
            macros = [f"-D{name}={value}" for name, value in dataclasses.asdict(variant).items()]
            source = Path(__file__).with_name("nf4_emulated.cpp")
            command = ["g++", "-O1", "-std=c++20", "-w", "-shared", "-fPIC", *macros, str(source), "-o", str(library)]
            subprocess.run(command, check=True)
            found[variant] = ctypes.CDLL(str(library))
        return found[variant]

    return build


def pointer(tensor):
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def run_emulated(library, x, packed, states, variant, split, adapter=None, adapters=None, together=(0, 1)):
    weight, rows = nf4.weight(packed, states), x.shape[0]
    split = split if variant.prepared else abs(split)
    grid, tiles = variant.grid(rows, weight.n, weight.k, split), variant.tiles(rows, weight.n)
    out = torch.full((rows, weight.n), float("nan"), dtype=x.dtype)
    partial = torch.full((variant.workspace(grid, split),), float("nan"))
    counters = torch.zeros(2 * math.prod(tiles), dtype=torch.int32)  # more than the package's own variants need
    h, b, rank, ready, operand = None, None, 0, None, x
    if adapter:
        (h, ready), b, rank = shrunk(library, x, weight, variant, adapter, adapters), adapter.b, adapter.rank
    if variant.prepared:
        operand, shape = nf4.room_for_x(variant, x)
        library.launch_prepare(pointer(x), pointer(operand), rows, weight.k, x.stride(0), *shape)
    pointers = [pointer(operand), pointer(packed), ctypes.byref(weight.fixed), pointer(out), pointer(partial)]
    sizes = [len(states), rows, weight.n, weight.k, x.stride(0)]
    factor = ctypes.c_float(nf4.FACTORS[variant.HALF])
    fixed = (*pointers, pointer(counters), *sizes, factor, pointer(h), pointer(b), rank, pointer(ready))
    patience, at_once = together  # how often a block of threads waits, how many run at a time
    library.launch(*fixed, 0 if split < 0 else patience, int(split < 0), at_once, *grid)
    assert not counters.any(), "the counters must be zero again for the next launch"
    return out


def updates(x, a, b, slots):
    """What an adapter adds, in float64 but for x A^T, which the kernel rounds; and the same of absolute values."""
    has = (slots >= 0)[:, None].double()
    pairs = [((x.double() @ m.double().T).to(x.dtype).double() * has, n.double()) for m, n in zip(a, b, strict=True)]
    return [torch.cat([f(h) @ f(n).T for h, n in pairs], dim=1) for f in (torch.clone, torch.abs)]


def shrunk(library, x, weight, variant, adapter, adapters):
    h = torch.full((x.shape[0], len(adapter.a), adapter.rank), float("nan"), dtype=x.dtype)
    grid = nf4.shrink_grid(variant, x.shape[0], weight.k, len(adapter.a) * adapter.rank)
    partial = torch.full((math.prod(grid) * 16 * variant.MT * 8,), float("nan"))
    counters = torch.zeros(grid[0] * grid[2], dtype=torch.int32)  # more than the package's own variants need
    ready = torch.ones_like(counters)  # as the last launch leaves it
    pointers = [pointer(v) for v in (x, adapter.a, h, partial, counters, adapters)]
    sizes = (len(adapter.a), adapter.rank, x.shape[0], weight.k, x.stride(0))
    library.launch_shrink(*pointers, *sizes, pointer(ready), *grid)
    assert not counters.any() and ready.all()
    return h, ready


SMALL = [
    Variant(1, 1, 2), Variant(2, 2, 1), Variant(2, 1, 2, HALF=1), Variant(1, 2, 3, HALF=1),
    Variant(1, 2, 2), Variant(4, 2, 1, HALF=1), Variant(2, 2, 3), Variant(4, 1, 3, HALF=1),
    Variant(8, 2, 4, WGMMA=2, HALF=1), Variant(2, 1, 4, WGMMA=1), Variant(1, 2, 4, WGMMA=2, ALIGNED=1),
    Variant(8, 1, 4, WGMMA=2, ALIGNED=1), Variant(2, 2, 3, ALIGNED=1, HALF=1),
]  # fmt: skip


LAYERS = dict(
    variant=st.sampled_from(SMALL),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 11),
    split=st.sampled_from([1, 2, 3, -1, -2, -5]),  # below 0: a stream's blocks; only of variants with WGMMA=2
    seed=st.integers(0, 2**30),
)


@given(shards=st.lists(st.integers(1, 40) | st.sampled_from([8, 16, 24, 72]), min_size=1, max_size=3), **LAYERS)
@example(variant=SMALL[0], rows=17, shards=[1], blocks=5, split=2, seed=0)
@example(variant=SMALL[3], rows=17, shards=[3, 69], blocks=9, split=2, seed=0)  # whole columns of y, three batches
@example(variant=SMALL[4], rows=9, shards=[33, 2], blocks=11, split=3, seed=0)
@example(variant=SMALL[5], rows=40, shards=[40, 40], blocks=7, split=2, seed=0)
@example(variant=SMALL[6], rows=33, shards=[200, 31], blocks=9, split=2, seed=0)  # 16 rows of x for 3 warps
@example(variant=SMALL[7], rows=8, shards=[50], blocks=6, split=1, seed=0)
@FEW
def test_the_kernel_multiplies_as_exactly_as_bitsandbytes(emulated, variant, rows, shards, blocks, split, seed):
    dtype = DTYPES[variant.HALF]
    packed, states = quantized(shards, blocks * 64, seed)
    before = packed.clone()
    x = torch.randn(rows, blocks * 64 + 8, generator=torch.Generator().manual_seed(seed)).to(dtype)[:, : blocks * 64]
    ours = run_emulated(emulated(variant), x, packed, states, variant, split)
    assert_right(ours, packed, states, x)
    assert torch.equal(packed, before), "the packed weights are never written"


@given(shards=st.lists(st.integers(1, 3), min_size=1, max_size=3), rank=st.sampled_from([32, 64]), **LAYERS)
@example(variant=SMALL[3], rows=9, shards=[1, 2, 3], blocks=3, split=1, rank=64, seed=0)  # a warp's rows in two shards
@example(variant=SMALL[5], rows=33, shards=[3, 1, 1], blocks=9, split=2, rank=32, seed=0)
@FEW
def test_an_adapters_update_is_added_to_the_rows_that_have_one(
    emulated, variant, rows, shards, blocks, split, rank, seed
):
    dtype, k, generator = DTYPES[variant.HALF], blocks * 64, torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    packed, states = quantized([16 * n for n in shards], k, seed)
    x, adapters = draw(rows, k), torch.randint(-1, 1, (rows,), generator=generator, dtype=torch.int32)
    a, b = [draw(rank, k) / k**0.5 for _ in shards], [draw(16 * n, rank) for n in shards]
    ours = run_emulated(emulated(variant), x, packed, states, variant, split, nf4.adapter(a, b), adapters)
    assert_right(ours, packed, states, x, *updates(x, a, b, adapters))


@pytest.mark.parametrize("half", [0, 1])
def test_the_kernels_error_is_not_above_bitsandbytes_own(emulated, half):
    variant = Variant(2, 1, 2, HALF=half)
    packed, states = quantized([64, 32], 1024, 3)
    x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(5)).to(DTYPES[half])
    truth = exact(packed, states, x)
    ours = run_emulated(emulated(variant), x, packed, states, variant, 2)
    with torch.no_grad():
        cut = 64 * 1024 // 2
        parts = zip((packed[:cut], packed[cut:]), states, strict=True)
        theirs = torch.cat([matmul_4bit(x, part.t(), state) for part, state in parts], dim=1)
    print(f"\nerror against float64: {off(ours, truth):.2e}, bitsandbytes {off(theirs, truth):.2e}")
    assert off(ours, truth) <= off(theirs, truth)


@given(
    variant=st.sampled_from([SMALL[0], SMALL[4], SMALL[5], SMALL[6]]),
    blocks=st.integers(5, 60),
    split=st.integers(2, 30),
    together=st.integers(1, 40),
    patience=st.integers(0, 300),
    seed=st.integers(0, 2**30),
)
@example(variant=SMALL[5], blocks=56, split=28, together=28, patience=1000, seed=0)
@example(variant=SMALL[5], blocks=56, split=28, together=5, patience=1000, seed=0)
@example(variant=SMALL[0], blocks=20, split=5, together=10, patience=1000, seed=0)
@example(variant=SMALL[0], blocks=20, split=5, together=5, patience=1, seed=0)
@example(variant=SMALL[4], blocks=30, split=7, together=5, patience=1, seed=0)
@FEW
def test_blocks_that_wait_for_each_other_add_what_the_last_one_alone_would(
    emulated, variant, blocks, split, together, patience, seed
):
    packed, states = quantized([70, 35], blocks * 64, seed)
    x = torch.randn(9, blocks * 64, generator=torch.Generator().manual_seed(seed)).to(DTYPES[variant.HALF])
    alone = run_emulated(emulated(variant), x, packed, states, variant, split)
    assert_right(alone, packed, states, x)
    waiting = run_emulated(emulated(variant), x, packed, states, variant, split, together=(patience, together))
    assert torch.equal(alone, waiting)
    parts = variant.grid(9, 105, blocks * 64, split)[2]
    if 1 < parts <= 8:
        clusters = run_emulated(emulated(variant), x, packed, states, variant, split, together=(-1, 2 * parts))
        assert torch.equal(alone, clusters)


@given(half=st.booleans(), factor=st.floats(1, 2))
def test_no_other_scale_of_the_table_is_rounded_better(half, factor):
    code = quantized([1], 64, 0)[1][0].code.double()

    def rounding(factor):
        return off((code * factor).to(DTYPES[half]).double() / factor, code)

    assert rounding(nf4.FACTORS[half]) < min(1e-3 if not half else 1e-4, rounding(factor) * 1.02)


@pytest.mark.parametrize("variant", all_variants())
@pytest.mark.parametrize("half", [0, 1])
def test_every_variant_that_a_gpu_would_run(emulated, variant, half):
    variant = dataclasses.replace(variant, HALF=half)
    packed, states = quantized([150, 51], 576, 11)
    x = torch.randn(variant.MT * 8 + 3, 576, generator=torch.Generator().manual_seed(7)).to(DTYPES[half])
    first = run_emulated(emulated(variant), x, packed, states, variant, 2)
    assert_right(first, packed, states, x)
    assert torch.equal(first, run_emulated(emulated(variant), x, packed, states, variant, 2)), "the same bits again"


@given(n=st.integers(1, 60000), blocks=st.integers(1, 500), rows=st.integers(1, 128), processors=st.integers(1, 200))
def test_no_split_leaves_a_block_of_threads_without_work(n, blocks, rows, processors):
    for variant in nf4_variants.variants(rows, False, (8, 0)) + nf4_variants.variants(rows, False, (9, 0)):
        for split in nf4_variants.splits(variant, rows, n, blocks * 64, processors):
            batches, tiles = variant.tiles(rows, n)
            *_, parts = variant.grid(rows, n, blocks * 64, split)
            per = variant.per(blocks, parts)  # as nf4.cu cuts K
            assert (parts - 1) * per < blocks <= parts * per
            assert split > 0 or batches * tiles * -(-blocks // 4) >= -split, "nor of a stream"
            assert tiles * variant.rows >= n and batches * variant.MT * 8 >= rows and batches <= 4
            assert 2 * tiles * batches <= 8 * -(-n // 16), "the counters suffice"
            assert parts < 256, "the kernel counts in 8 bits"


@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 128])
def test_some_variant_fits_the_99_kib_of_an_l4s_blocks(rows):
    assert any(variant.shared + 1024 <= 99 * 1024 for variant in nf4_variants.variants(rows, False, (8, 9)))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_every_variant_compiles_for_ampere_and_hopper_by_nvrtc(capability):
    """By the compiler that a GPU's users have (requirements.txt); newer ones take more."""
    some = {(8, 0): AMPERE, (9, 0): HOPPER}[capability].values()
    for variant in [dataclasses.replace(v, HALF=half) for vs in some for v in vs for half in (0, 1)]:
        assert len(nvrtc.cubin(nf4.source(), dataclasses.asdict(variant), capability, "13")) > 10_000


UNKNOWN = [({"quant_type": "fp4"}, "fp4"), ({"nested": True}, "quantized"), ({"k": 96}, "multiple of 64")]


@pytest.mark.parametrize(("options", "reason"), UNKNOWN)
def test_what_the_kernel_does_not_know_is_named(options, reason):
    packed, states = quantized([4], **({"k": 128, "seed": 0} | options))
    assert reason in nf4.unsupported(packed, states)


def test_without_a_gpu_or_switched_off_it_is_bitsandbytes_product():
    packed, states = quantized([4], 128, 0)
    x = torch.randn(2, 128).bfloat16()
    for chooser in (products.Products(enabled=True), products.Products(enabled=False)):
        assert chooser.apply(SimpleNamespace(), x, packed, states, lambda x: "theirs") == "theirs"


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 8, 16, 33, 64, 65, 128])
def test_on_the_gpu_it_is_as_exact_and_repeatable_also_in_a_graph(rows, dtype):
    packed, states = quantized([300, 51], 1088, rows, "cuda")
    weight = nf4.weight(packed, states)
    x = torch.randn(rows, 2176, device="cuda").to(dtype)[:, ::2]
    truth = exact(packed, states, x)
    theirs = matmul_4bit(x, packed[: 300 * 544].t(), states[0])
    for variant in nf4_variants.variants(rows, dtype == torch.float16, torch.cuda.get_device_capability()):
        for split in (1, 2, 3, *((-5, -40) if variant.prepared else ())):
            ours = nf4.matmul(x, weight, variant, split)
            assert off(ours[:, :300], truth[:, :300]) <= off(theirs, truth[:, :300]) * 1.02
            assert_right(ours, packed, states, x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = nf4.matmul(x, weight, variant, split)
            for _ in range(3):
                again.fill_(float("nan"))
                graph.replay()
                assert torch.equal(ours, again)
    assert not weight.counters.any()


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16, 33, 128])
def test_on_the_gpu_an_adapters_update_is_exact_and_repeatable_also_in_a_graph(rows, dtype):
    packed, states = quantized([4096, 1024, 1024], 4096, rows, "cuda")
    weight, x = nf4.weight(packed, states), torch.randn(rows, 4096, device="cuda").to(dtype)
    a = [torch.randn(32, 4096, device="cuda").to(dtype) / 64 for _ in range(3)]
    b = [torch.randn(n, 32, device="cuda").to(dtype) for n in (4096, 1024, 1024)]
    adapter, slots = nf4.adapter(a, b), torch.randint(-1, 1, (rows,), dtype=torch.int32, device="cuda")
    truth = exact(packed, states, x) + updates(x, a, b, slots)[0]
    unit = 2**-8 if dtype == torch.bfloat16 else 2**-11
    for variant in nf4_variants.variants(rows, dtype == torch.float16, torch.cuda.get_device_capability()):
        for split in (1, 3, *((-70, -132) if variant.prepared else ())):
            ours = nf4.matmul(x, weight, variant, split, adapter, slots)
            assert off(ours, truth) < unit
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = nf4.matmul(x, weight, variant, split, adapter, slots)
            for _ in range(3):
                again.fill_(float("nan"))
                graph.replay()
                assert torch.equal(ours, again)
    assert not weight.counters.any() and not adapter.counters.any()


def test_what_an_adapter_adds_is_known_apart_from_the_kernel(monkeypatch):
    packed, states = quantized([32, 16], 64, 0)
    x, base = torch.randn(5, 64).bfloat16(), exact(packed, states, torch.zeros(5, 64))

    def matmul(x, weight, variant, split, adapter=None, slots=None):
        if adapter is None:
            return base
        seen.append((adapter.rank, slots.tolist()))
        return base + 1

    seen = []
    monkeypatch.setattr(products, "matmul", matmul)
    ours, right = products.adapted(x, nf4.weight(packed, states), FAST, 1, 64, torch.Generator().manual_seed(0))
    assert seen == [(64, [0, -1, 0, -1, 0])]
    assert (ours == base + 1).all() and (right[1::2] == base[1::2]).all()
    assert right[::2].std() == pytest.approx(64**0.5, rel=0.3)


@gpu
@pytest.mark.parametrize("rank", [0, 32])
def test_the_choice_is_made_once_and_said(rank):
    chooser, layer = products.Products(), SimpleNamespace()
    packed, states = quantized([4096], 4096, 1, "cuda")
    x = torch.randn(16, 4096, device="cuda").bfloat16()
    a, b = (torch.randn(*shape, device="cuda").bfloat16() / 64 for shape in ((32, 4096), (4096, 32)))

    def theirs(x):
        return matmul_4bit(x, packed.t(), states[0])

    for slots in (None, torch.zeros(16, dtype=torch.int32, device="cuda")):
        if rank:
            chooser.update = (nf4.adapter([a], [b]), slots)
        added = updates(x, [a], [b], slots)[0] if rank and slots is not None else 0
        ours = chooser.apply(layer, x, packed, states, theirs)
        assert off(ours, theirs(x).double() + added) < 5e-3
        assert (chooser.update is None) == (not rank or slots is not None), "whoever adds it says so"
    assert list(chooser.chosen) == [(4096, 4096, torch.bfloat16, rank)]
    assert "times as fast" in chooser.summary()


@pytest.mark.parametrize(
    ("times", "result", "said"),
    [
        ((2e-5, 1e-5), 1.0, "the kit's kernel, 2.0 to 2.0 times as fast as bitsandbytes; else bitsandbytes"),
        ((1e-5, 2e-5), 1.0, "8 x 64 with 33 to 64 rows: 10 against 20 microseconds"),
        ((2e-5, 1e-5), 1.1, "8 x 64 with 1 row: its result is off by 10.0%"),
        ((2e-5, 1e-5, 1.1), 1.0, "8 x 64 with 17 to 32 rows: its result with an adapter is off by 10.0%"),
        (
            (2e-5, OSError("no NVRTC")),
            1.0,
            "4-bit products while decoding: bitsandbytes (the kernel fails here: no NVRTC)",
        ),
    ],
)
def test_the_faster_product_is_taken_if_it_agrees_and_the_reason_is_said(times, result, said, monkeypatch):
    def timings(x, weight, given):
        if isinstance(times[1], Exception):
            raise times[1]
        return {(FAST, 1): times[1], (FAST, 2): 1.0}

    def theirs(x):
        return torch.ones(x.shape[0], 8)

    monkeypatch.setattr(products, "seconds", lambda call: times[0 if call.func is theirs else 1])
    monkeypatch.setattr(products, "timings", timings)
    monkeypatch.setattr(products, "matmul", lambda x, weight, variant, split: torch.full((x.shape[0], 8), result))
    updated = torch.full((2, 8), times[2] if len(times) > 2 else 1.0)
    monkeypatch.setattr(products, "adapted", lambda *_: (updated, torch.ones(2, 8)))
    chooser = products.Products()
    mine = nf4.weight(*quantized([8], 64, 0))
    best = chooser.choose(torch.zeros(3, 64), mine, theirs, SimpleNamespace(rank=32) if len(times) > 2 else None)
    assert best == [(FAST, 1) if times == (2e-5, 1e-5) and result == 1 else None] * 6
    assert said in chooser.summary()


def test_a_layer_with_an_adapter_takes_the_kernel_that_is_the_fastest_with_it(monkeypatch):
    alone, theirs = {1: 1e-5, 2: 2e-5}, lambda x: torch.ones(x.shape[0], 8)
    monkeypatch.setattr(products, "seconds", lambda call: 4e-5 if call.func is theirs else alone[call.args[3]])
    monkeypatch.setattr(products, "timings", lambda x, weight, given: {(FAST, 1): 9e-5, (FAST, 2): 3e-5})
    monkeypatch.setattr(products, "matmul", lambda x, *_: torch.ones(x.shape[0], 8))
    monkeypatch.setattr(products, "adapted", lambda *_: (torch.ones(2, 8), torch.ones(2, 8)))
    chooser, mine = products.Products(), nf4.weight(*quantized([8], 64, 0))
    assert chooser.choose(torch.zeros(3, 64), mine, theirs, SimpleNamespace(rank=32)) == [(FAST, 2)] * 6
    assert chooser.gains == [2] * 6, "against bitsandbytes without the adapter, which then comes on top"


def test_after_a_failure_no_gain_is_claimed(monkeypatch):
    chooser, calls = products.Products(), iter([1e-5, OSError("the card fell off")])

    def timings(x, weight, given):
        if isinstance(found := next(calls), Exception):
            raise found
        return {(FAST, 1): found}

    monkeypatch.setattr(products, "seconds", lambda call: 2e-5)
    monkeypatch.setattr(products, "timings", timings)
    monkeypatch.setattr(products, "matmul", lambda x, weight, variant, split: torch.ones(x.shape[0], 8))
    monkeypatch.setattr(products, "adapted", lambda *_: (torch.ones(2, 8), torch.ones(2, 8)))
    mine = nf4.weight(*quantized([8], 64, 0))
    assert chooser.choose(torch.zeros(3, 64), mine, lambda x: torch.ones(x.shape[0], 8)) == [None] * 6
    assert not chooser.enabled
    assert chooser.summary() == (
        "4-bit products while decoding: bitsandbytes (the kernel fails here: the card fell off)"
    )


def test_an_older_card_is_told_once_why_it_decodes_with_bitsandbytes():
    chooser = products.Products()
    for seed in (0, 1):
        assert chooser.weight(*quantized([8], 64, seed), capability=(7, 5)) is None
    assert chooser.summary().count("Ampere") == 1
    assert products.Products().summary() is None, "nothing was 4-bit, or nothing was decoded yet"
