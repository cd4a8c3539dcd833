"""Every finding: a script that has it, the same script without it, and a page that explains it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
from helpers_audit import audited, traced_operations
from helpers_engine import casting
from mezzo.observe.audit.findings import RULES, AuditedSteps, findings
from mezzo.observe.audit.observer import uses_tensor_cores
from mezzo.observe.settings import MOST_LISTED
from mezzo.records import Product
from paths import ROOT

PAGES = ROOT / "docs" / "findings"

# code: policies of the planted and the healthy run, modules that are blamed, a word of the sentence
CASES: dict[str, tuple[str, str, list[str], str]] = {
    "A101": ("as-is", "as-is", ["first", "middle", "last"], "nothing in the step lowers precision"),
    "A102": ("as-is", "as-is", ["(script)"], "autocast is off around it, and on elsewhere"),
    "A103": ("as-is", "as-is", ["middle"], "autocast is on when middle begins"),
    "A104": ("bf16:fp32=matmul", "bf16", ["first", "middle", "last"], "the policy lists the family of"),
    "A105": ("as-is", "as-is", ["middle"], "became FP32 by meeting FP32 operands"),
    "A106": ("as-is", "as-is", ["middle"], "autocast has no rule for mm"),
    "A107": ("as-is", "as-is", ["first", "middle", "last"], "its operands are FP64"),
    "A108": ("as-is", "as-is", ["first", "middle", "last"], "autocast around it is off: enabled=False, or for another"),
    "A201": ("as-is", "as-is", ["first", "last"], "n = 12: not a multiple of 8"),
    "A202": ("as-is", "as-is", ["middle"], "begins at a multiple of 2 bytes, not of 16"),
    "A203": ("as-is", "as-is", ["0", "2"], "its input is channels-first"),
    "A205": ("as-is", "as-is", ["0"], "2 copies; the largest: convolution in 0 (forward)"),
    "A301": ("as-is", "as-is", ["middle"], "bf16 > fp32 > bf16 in middle"),
    "A302": ("as-is", "as-is", ["middle"], "casts of weights that the same forward pass had cast before"),
    "A303": ("as-is", "as-is", ["middle"], "of all bytes, most in middle"),
    "A304": ("as-is", "as-is", ["middle"], "mixes bf16 and fp32"),
    "A305": ("bf16", "bf16:lower=layer_norm", ["middle"], "a norm reads FP32 values and keeps them"),
    "A401": ("as-is", "as-is", [], "updates bf16 parameters in place"),
    "A402": ("as-is", "as-is", ["middle"], "_softmax ran on bf16 operands"),
}
ON_CUDA_ONLY = ["A204", "A501"]


@pytest.mark.usefixtures("backward_way")
@pytest.mark.parametrize("code", CASES)
def test_a_planted_script_has_the_finding(code: str) -> None:
    policy, _, modules, sentence = CASES[code]
    record = audited("audit_cases", code, "planted", policy=policy)
    found = next((f for f in record.findings if f.code == code), None)
    assert found is not None, [f.code for f in record.findings]
    assert sorted(found.modules) == sorted(modules)
    assert sentence in found.detail
    assert found.gain
    assert 0 < found.share <= 1


@pytest.mark.parametrize("code", ["A102", "A301", "A302"])
def test_casts_of_torchs_autocast_are_the_scripts_after_a_policy_ran_in_the_process(code: str) -> None:
    """Then Mezzo's kernels stand at autocast's dispatch key, and pass on to torch's."""
    assert casting("fp16:arithmetic=emulated").way == "table"
    test_a_planted_script_has_the_finding(code)


@pytest.mark.usefixtures("backward_way")
@pytest.mark.parametrize("code", CASES)
def test_the_healthy_script_does_not_have_it(code: str) -> None:
    record = audited("audit_cases", code, "healthy", policy=CASES[code][1])
    assert record.steps == [2]
    assert code not in [f.code for f in record.findings]


def test_a_healthy_script_has_no_finding_at_all() -> None:
    assert audited("audit_cases", "A102", "healthy").findings == []


def test_every_code_has_a_case_and_a_page() -> None:
    codes = [rule.code for rule in RULES]
    assert codes == sorted({*CASES, *ON_CUDA_ONLY})
    assert {path.stem for path in PAGES.glob("A[1-5]*.md")} == set(codes)
    for rule in RULES:
        text = (PAGES / f"{rule.code}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {rule.code}: {rule.title}\n")
        heads = re.findall(r"^## (.*)$", text, re.M)
        assert heads == ["Cause", "What it costs", "Example", "How it is found", "In the output", "Fix"]


# --- which casts are of one weight ---------------------------------------------------------------


class Flat(nn.Module):
    """Weights that are views of one storage, as cuDNN's recurrent layers and FSDP1 keep them; ``use`` casts them."""

    def __init__(self, use: Callable[[Flat], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.flat = torch.zeros(2 * 64 + 8)
        self.weights = nn.ParameterList(
            [self.flat[:64].view(8, 8), self.flat[64:128].view(8, 8), self.flat[128:].view(8)]
        )

    def forward(self) -> Tensor:
        return self.use(self)


def cast_each(model: Flat) -> Tensor:
    return torch.cat([w.to(torch.bfloat16).reshape(-1) for w in model.weights])


def cast_into_one_buffer(model: Flat) -> Tensor:
    """What autocast does with the weights of a recurrent layer of cuDNN."""
    buffer = torch.zeros(model.flat.numel(), dtype=torch.bfloat16)
    for weight in model.weights:
        begin = weight.storage_offset()
        buffer[begin : begin + weight.numel()].view(weight.shape).copy_(weight)
    return buffer


def cast_first(*views: Callable[[Tensor], Tensor]) -> Callable[[Flat], Tensor]:
    return lambda model: torch.cat([view(model.weights[0]).to(torch.bfloat16).reshape(-1) for view in views])


CASTS: dict[str, tuple[Callable[[Flat], Tensor], int]] = {
    "each once": (cast_each, 0),
    "each once, into one buffer": (cast_into_one_buffer, 0),
    "each twice": (lambda model: cast_each(model) + cast_each(model), 3),
    "each twice, into two buffers": (lambda model: cast_into_one_buffer(model) + cast_into_one_buffer(model), 3),
    "one twice": (cast_first(lambda w: w, lambda w: w), 1),
    "one and its transpose": (cast_first(lambda w: w, lambda w: w.t()), 1),
    "one and its rows end to end": (cast_first(lambda w: w, lambda w: w.view(-1)), 1),
    "halves of the rows": (cast_first(lambda w: w[:4], lambda w: w[4:]), 0),
    "halves of the columns": (cast_first(lambda w: w[:, :4], lambda w: w[:, 4:]), 0),
    "the first row and the first column": (cast_first(lambda w: w[0], lambda w: w[:, 0]), 0),
    "the same slice twice": (cast_first(lambda w: w[2:4], lambda w: w[2:4]), 1),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_weight_is_known_by_its_part_of_a_storage(name: str) -> None:
    use, again = CASTS[name]
    model = Flat(use)
    with torch.no_grad():
        found = [f.detail for f in mezzo.audit(model).findings if f.code == "A302"]
    assert found == ([f"{again} casts of weights that the same forward pass had cast before"] if again else [])


def test_a_recurrent_layer_casts_each_weight_once_where_its_weights_share_a_storage() -> None:
    layer = nn.LSTM(16, 32, 2)
    flat, begin = torch.nn.utils.parameters_to_vector(layer.parameters()).detach(), 0
    for weight in layer.parameters():
        weight.data = flat[begin : begin + weight.numel()].view_as(weight)
        begin += weight.numel()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            outputs, _ = layer(torch.zeros(3, 2, 16))
        outputs.float().sum().backward()

    torch._C._set_mkldnn_enabled(False)  # oneDNN has no BF16 layer for CPUs without AVX-512
    try:
        record = mezzo.audit(step)
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert [cast.count for cast in record.casts if cast.of == "weight"] == [8]
    assert "A302" not in [finding.code for finding in record.findings]


# --- what only a GPU shows -----------------------------------------------------------------------

KERNELS = {
    "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_32x6_tn": True,
    "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize96x64x64_stage3_warpsize2x2x1_tensor16x8x16_kernel": True,
    "turing_fp16_s1688gemm_fp16_256x128_ldg8_f2f_nn": True,
    "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nt": True,
    "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_tn_align8": True,
    "nvjet_tst_128x64_64x11_2x1_v_bz_coopA_TNT": True,
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>": True,
    "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8": True,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0": True,
    "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_g1_tensor16x8x8_kernel": True,
    "void cutlass::device_kernel<CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedFP8<4>>>": True,
    "void cutlass::device_kernel<CollectiveMma<cutlass::gemm::MainloopSm100TmaUmmaWarpSpecialized<3>>>": True,
    "cutlass3x_sm100_tensorop_gemm_f16_f16_f32_f16_f16_128x64x64_1x1x1_0_tnn_align8_1sm": True,
    "fused_attention_sm100_tcgen05_fwd": True,
    "triton_tem_fused_mm_0": True,
    "Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SE_1LDSB0": True,
    "ck::kernel_gemm_xdl_mfma_f32_32x32x8f16": True,
    "Cijk_Alik_Bljk_SB_MT64x64x16_SE_1LDSB0": False,
    "triton_poi_fused_add_relu_0": False,
    "triton_red_fused_native_layer_norm_1": False,
    "volta_sgemm_128x64_nn": False,
    "implicit_convolve_sgemm": False,
    "ampere_scudnn_128x32_relu_medium_nn_v1": False,
    "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>": False,
    "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, c10::Half, int>": False,
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, true>": False,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, false>": False,
    "ampere_sgemm_128x64_tn": False,
    "cutlass_80_simt_sgemm_128x64_8x5_nn_align1": False,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": False,
}


@pytest.mark.parametrize(("name", "tensor_cores"), KERNELS.items())
def test_a_kernels_name_tells_whether_it_uses_tensor_cores(name: str, tensor_cores: bool) -> None:
    assert uses_tensor_cores(name) is tensor_cores


def product(**fields: object) -> Product:
    shape = {"op": "mm", "module": "a", "phase": "forward", "format": "bf16", "m": 8, "n": 8, "k": 8, "flops": 1024}
    return Product.model_validate({**shape, "eligible": True, **fields})


def steps_of(seen: list[Any] | None = None, **fields: Any) -> AuditedSteps:
    known = {"operations": one_product(1024) if seen is None else seen, "wide": [], "trips": [], "products": []}
    return AuditedSteps(**known | fields)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"on_tensor_cores": False, "kernels": ["ampere_sgemm_128x64_tn"]}, ["A501"]),
        ({"on_tensor_cores": True, "kernels": ["ampere_s16816"]}, []),
        ({"on_tensor_cores": None}, []),
        ({"on_tensor_cores": False, "eligible": False}, []),
        ({"on_tensor_cores": False, "format": "fp32"}, []),
    ],
)
def test_an_eligible_product_that_ran_without_tensor_cores(fields: dict[str, object], found: list[str]) -> None:
    assert [f.code for f in findings(steps_of(products=[product(**fields)])) if f.code == "A501"] == found


@pytest.mark.parametrize(
    ("device_type", "capability", "form", "found"),
    [
        ("cuda", (8, 0), "fp32", True),
        ("cuda", (7, 5), "fp32", False),
        ("cuda", (9, 0), "tf32", False),
        ("cpu", None, "fp32", False),
    ],
)
def test_tf32_that_is_off_where_the_gpu_has_it(
    device_type: str, capability: tuple[int, int] | None, form: str, found: bool
) -> None:
    watched = steps_of(one_product(1024, form=form), device_type=device_type, capability=capability)
    assert ("A204" in [f.code for f in findings(watched)]) is found


@pytest.mark.parametrize(
    ("count", "more"), [(MOST_LISTED, ""), (MOST_LISTED + 1, f"; {MOST_LISTED + 1} modules in all")]
)
def test_a_finding_of_many_modules_says_how_many(count: int, more: str) -> None:
    fields = {"on_tensor_cores": False, "kernels": ["ampere_sgemm_128x64_tn"]}
    seen = [one for _ in range(count) for one in one_product(1024)]
    many = [product(module=f"m{n}", **fields) for n in range(count)]
    (found,) = (f for f in findings(steps_of(seen, products=many)) if f.code == "A501")
    assert found.modules == [f"m{n}" for n in range(MOST_LISTED)]
    assert found.detail.partition(";")[1:] == more.partition(";")[1:]


def one_product(flops: int, *, form: str = "bf16") -> list[object]:
    from mezzo.observe.audit.operations import TracedOperation
    from mezzo.observe.trace import NOWHERE, RawOperation
    from mezzo.observe.trace import TracedProduct as Running

    running = Running(form, flops, [], 0)
    raw = RawOperation(None, NOWHERE, None, [], [], False, False, running, "", False, False, (), "")
    row = {"op": "mm", "module": "a", "phase": "forward", "inputs": (form,), "outputs": (form,), "bytes": 1}
    return [TracedOperation(**row, raw=raw, flops=flops, format=form, product=running)]


@pytest.mark.filterwarnings("ignore")
def test_products_of_fp8_layers_have_their_phases() -> None:
    """Layers of torchao multiply wrappers around scaled casts, and both gradients in one function of their own."""
    float8 = pytest.importorskip("torchao.float8")
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 16, bias=False)).bfloat16()
    float8.convert_to_float8_training(model)
    inputs = torch.randn(48, 32, dtype=torch.bfloat16)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(inputs).sum().backward()

    found = {(p.module, p.phase, p.format, p.m, p.n, p.k) for p in mezzo.audit(step).products}
    assert found == {
        ("0", "forward", "e4m3", 48, 64, 32),
        ("0", "dgrad", "e4m3", 48, 32, 64),  # not needed, but torchao computes it
        ("0", "wgrad", "e4m3", 64, 32, 48),
        ("2", "forward", "e4m3", 48, 16, 64),
        ("2", "dgrad", "e4m3", 48, 64, 16),
        ("2", "wgrad", "e4m3", 16, 64, 48),
    }


def test_an_optimizer_that_multiplies_in_16_bits_is_no_autocast() -> None:
    record = audited("muon")
    assert {finding.code for finding in record.findings} & {"A101", "A102"} == {"A101"}
    assert {product.reason for product in record.wide_products} == {"nothing in the step lowers precision"}


@pytest.mark.parametrize("own", ["", "wide"])
def test_an_optimizers_products_are_not_left_alone(own: str) -> None:
    assert audited("muon", own, policy="bf16").run.effective.left_alone == []


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_upsampling_in_16_bits_is_not_sensitive(mode: str) -> None:
    def upsampled(flat: Flat) -> Tensor:
        return F.interpolate(flat.flat[:64].view(1, 1, 8, 8).to(torch.bfloat16), scale_factor=2, mode=mode)

    def step() -> None:
        Flat(upsampled)()
        torch.softmax(torch.ones(8, 8, dtype=torch.bfloat16), -1)

    steps = steps_of(traced_operations(step))
    assert [one.detail.partition(" ran")[0] for one in findings(steps) if one.code == "A402"] == ["_softmax"]


def test_products_of_a_closure_are_no_part_of_the_update() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        return loss

    record = mezzo.audit(lambda: optimizer.step(closure))
    assert "A101" in [one.code for one in record.findings]
    evaluation = 2 * 4 * (8 * 16 + 16)
    assert record.flops_by_phase["forward"] == {"fp32": 2 * evaluation}
    assert record.flops_by_phase["wgrad"] == {"fp32": 2 * evaluation}
