"""Without a T4: vLLM's Triton kernels, as the T4 preset launches them, compile for it; what it lacks is noticed."""

import pytest

from colab_kit.t4_audit import SHARED_BYTES, for_t4

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


def test_the_presets_triton_kernels_compile_for_a_t4_and_fit_its_shared_memory(in_fresh_process):
    rows = in_fresh_process("import json; from colab_kit.t4_audit import *; print(json.dumps(preset_kernels()))")
    assert not [row for row in rows if row["problem"]]
    assert max(row["shared"] for row in rows) <= SHARED_BYTES
    attention = [row["constants"]["IS_3D"] for row in rows if row["name"] == "kernel_unified_attention"]
    assert {0, 1} <= set(attention), "prefill and decoding"
    assert {"reshape_and_cache_kernel_flash", "kernel_unified_attention"} <= {r["name"] for r in rows}


@triton.jit
def in_bfloat16(x, n: tl.constexpr):
    at = x + tl.arange(0, n)
    narrow = tl.inline_asm_elementwise("cvt.rn.bf16.f32 $0, $1;", "=h,f", [tl.load(at)], tl.int16, True, 1)
    tl.store(at, narrow.to(tl.float32))


@triton.jit
def plain(x, n: tl.constexpr):
    at = x + tl.arange(0, n)
    tl.store(at, tl.load(at) * 2)


@pytest.mark.parametrize("kernel, runs", [(plain, True), (in_bfloat16, False)])
def test_an_instruction_that_a_t4_lacks_is_a_problem(kernel, runs):
    source = triton.compiler.ASTSource(kernel, {"x": "*fp32", "n": "constexpr"}, {(1,): 64})
    [row] = for_t4([(source, {"num_warps": 1})])
    assert (row["problem"] == "") == runs, row
