"""The Triton kernels compute the same values and gradients as the definition.

Without a GPU they run on the CPU, in Triton's interpreter. On a GPU (`make test-gpu`) they are compiled.
"""

import itertools
import math
import os
import subprocess
import sys
from importlib.util import spec_from_file_location

import kernel_cases as kernels
import pytest
import torch
from laws import FORMS, class_map, random_logits, soft_label

from semidice import kernels as kernels_package
from semidice.losses.options import LossOptions
from semidice.overlap import SumsOptions, reference_gradient, reference_sums, sums_options, terms_of, total_of

pytest.importorskip("triton")
import triton

from semidice.kernels import MAX_FUSED_CLASSES, fused, index_sums, plans, tilings

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.gpu if ON_GPU else []
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
ACTIVATIONS = ["softmax", "sigmoid", "none"]
ALL_SUMS = SumsOptions("softmax", "min", entropy=True)
MIN_LOSS = {"form": "min", "activation": "softmax", "entropy": True}
DICE_AND_ENTROPY = LossOptions()
# voxels of a tile of five classes
BLOCK = 64
# one voxel, about one tile, primes, programs of several tiles, no axes of space, many classes
SHAPES = [
    (1, 2, 1),
    (2, 5, BLOCK - 1),
    (1, 5, BLOCK),
    (2, 5, 13, 17),
    (1, 5, 17 * BLOCK + 1),
    (9, 4),
    (1, 19, 3, 5, 7),
    (1, 150, 37),
    (1, MAX_FUSED_CLASSES, 18),
]
num_multiprocessors = plans.num_multiprocessors


@pytest.fixture(autouse=True)
def _one_multiprocessor(monkeypatch):
    """Simulate a GPU with one multiprocessor, so that programs have several tiles of small tensors."""
    monkeypatch.setattr(plans, "num_multiprocessors", lambda device: 1)
    kernels.forget_plans()
    yield
    kernels.forget_plans()


def assert_equal_to_the_definition(prediction, target, valid=None, **options):
    on_device = [None if tensor is None else tensor.to(DEVICE) for tensor in (prediction, target, valid)]
    # sums of a few hundred float32 numbers, added in a different order
    kernels.assert_equal_to_the_definition(fused.fused_sums, *on_device, tolerance=1e-5, **options)


def mixture_and_gradient(
    logits, target, options=DICE_AND_ENTROPY, weight=None, valid=None, activation="softmax"
):
    """The total, its terms, the gradient of 2.5 times the total, and one of other weights, all detached."""
    leaf = logits.detach().requires_grad_()
    total = fused.fused_total(leaf, target, valid, weight, options, activation)
    terms = fused.fused_terms(leaf, target, valid, weight, options, activation)
    return _with_gradients(total, terms, leaf)


def defined_mixture_and_gradient(logits, target, options=DICE_AND_ENTROPY, weight=None, valid=None):
    """The same by the definition."""
    leaf = logits.detach().requires_grad_()
    sums = reference_sums(leaf, target, valid, sums_options(options, "softmax"))
    weight = torch.ones(logits.shape[1], device=logits.device) if weight is None else weight
    terms = terms_of(sums, weight, options)
    return _with_gradients(total_of(terms, options), terms, leaf)


def _with_gradients(total, terms, leaf):
    others = sum(factor * term for factor, term in zip((2.0, -3.0), terms.values(), strict=False))
    gradients = [torch.autograd.grad(each, leaf, retain_graph=True)[0] for each in (2.5 * total, others)]
    return total.detach(), *(term.detach() for term in terms.values()), *gradients


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_soft_targets_equal_the_definition(shape, activation):
    prediction = soft_label(*shape, seed=4) if activation == "none" else random_logits(*shape)
    valid = random_logits(shape[0], *shape[2:], seed=6) > -1
    number = SHAPES.index(shape) + ACTIVATIONS.index(activation)
    # the interpreter is slow, so without a GPU only some shapes have every form
    every = ON_GPU or shape in ((2, 5, BLOCK - 1), (1, 19, 3, 5, 7))
    for form in FORMS if every else [FORMS[number % len(FORMS)]]:
        mask = valid if form != "min" or number % 2 else None
        assert_equal_to_the_definition(
            prediction, soft_label(*shape), mask, form=form, activation=activation, entropy=True
        )


# few classes; integer tables at addresses that are and are not multiples of 8 bytes
@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 70), (3, 53, 70), (2, 64, 257)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_class_indices_equal_the_definition(shape, dtype):
    target = class_map((shape[0], *shape[2:]), shape[1]).to(dtype)
    number = shape[1] + dtype.itemsize
    for form in FORMS if ON_GPU or shape[1] == 3 else [FORMS[number % len(FORMS)]]:
        assert_equal_to_the_definition(random_logits(*shape), target, **MIN_LOSS | {"form": form})


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(2, 3, 70), (3, 53, 70)], ids=str)
def test_class_indices_with_a_mask_equal_the_definition(shape, activation):
    prediction = soft_label(*shape, seed=4) if activation == "none" else random_logits(*shape)
    target = class_map((shape[0], *shape[2:]), shape[1])
    valid = random_logits(shape[0], *shape[2:], seed=6) > -1
    # an ignored voxel may hold any value, such as an index that is not a class
    target[~valid] = 255
    for form in FORMS if ON_GPU or shape[1] == 3 else ["min", "squared"]:
        for entropy in (True, False):
            assert_equal_to_the_definition(
                prediction, target, valid, form=form, activation=activation, entropy=entropy
            )


@pytest.mark.parametrize("shape", [(1, 3, 80), (1, 70, 40)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_certain_and_uncertain_class_indices_equal_the_definition(shape, form):
    logits, target = random_logits(*shape), class_map((shape[0], shape[2]), shape[1])
    encoded = torch.zeros(shape).scatter_(1, target[:, None], 1.0)
    # voxels that are certain and correct, certain and wrong, uncertain with very large logits, and others
    kind = torch.arange(shape[2]) % 4
    logits += torch.where(kind == 0, 60.0, torch.where(kind == 1, -60.0, 0.0)) * encoded
    logits += torch.where(kind == 2, 300.0, 0.0)
    assert_equal_to_the_definition(logits, target, **MIN_LOSS | {"form": form})


@pytest.mark.parametrize("num_classes", [3, 60])
@pytest.mark.parametrize("region_weight", [0.75, 0.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_loss_is_not_finite_if_a_logit_is_not(num_classes, region_weight, value):
    """On a GPU the values of the inputs are not checked, so the loss must show the problem."""
    logits, target = random_logits(2, num_classes, 50), class_map((2, 50), num_classes)
    logits[1, 1, 7] = value
    options = LossOptions(region_weight=region_weight)
    assert not mixture_and_gradient(logits.to(DEVICE), target.to(DEVICE), options)[0].isfinite()


@pytest.mark.parametrize("num_classes", [3, 60])
def test_an_index_above_the_number_of_classes_counts_as_no_class(num_classes):
    logits, target = random_logits(1, num_classes, 50).to(DEVICE), class_map((1, 50), num_classes).to(DEVICE)
    target[:, ::7] = num_classes + 3
    encoded = torch.nn.functional.one_hot(target, num_classes + 4)[..., :num_classes].movedim(-1, 1).float()
    options = {"form": "relaxed", "activation": "softmax", "entropy": True}
    actual, expected = (
        kernels.sums_and_gradient(fused.fused_sums, logits, label, None, **options)
        for label in (target, encoded)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("ignored_value", [math.nan, math.inf])
@pytest.mark.parametrize("num_classes", [3, 60, 170])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_ignored_voxels_may_hold_any_value(num_classes, ignored_value, hard):
    logits, valid = random_logits(2, num_classes, 30), random_logits(2, 30, seed=6) > 0
    target = class_map((2, 30), num_classes) if hard else soft_label(2, num_classes, 30)
    results = []
    for fill in (0.0, ignored_value):
        filled = torch.where(valid[:, None], logits, fill).to(DEVICE)
        label = target if hard else torch.where(valid[:, None], target, fill)
        results.append(
            kernels.sums_and_gradient(
                fused.fused_sums, filled, label.to(DEVICE), valid.to(DEVICE), **MIN_LOSS
            )
        )
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_half_precision_logits_and_targets_equal_the_definition(dtype, target_dtype):
    logits, target = random_logits(2, 3, 9, 10).to(dtype), soft_label(2, 3, 9, 10).to(target_dtype)
    assert_equal_to_the_definition(logits, target, **MIN_LOSS)


def test_overlap_alone_and_entropy_alone_equal_the_definition():
    logits, target = random_logits(2, 3, 40), soft_label(2, 3, 40)
    for form, entropy in (("min", False), (None, True)):
        assert_equal_to_the_definition(logits, target, form=form, activation="softmax", entropy=entropy)


def test_any_strides_equal_the_definition():
    logits, target = random_logits(2, 3, 8, 12), soft_label(2, 3, 8, 12)
    valid = random_logits(2, 8, 24, seed=6) > -1
    channels_last = logits.contiguous(memory_format=torch.channels_last)
    for prediction, label, mask in (
        (channels_last, target, valid[..., :12]),
        (channels_last, target.contiguous(memory_format=torch.channels_last), None),
        (logits[..., ::2], target[..., ::2], valid[..., ::4]),
        (logits.transpose(2, 3), target.transpose(2, 3), valid[..., :12].transpose(1, 2)),
        (logits[:, :1].expand(2, 3, 8, 12), target[:, :, :1].expand(2, 3, 8, 12), None),
        (logits, class_map((2, 8, 24), 3)[..., ::2], valid[..., ::2]),
    ):
        assert_equal_to_the_definition(prediction, label, mask, **MIN_LOSS)


MIXTURES = {
    "default": {},
    "focal": {"gamma": 2.0},
    "root": {"gamma": 0.5},
    "log": {"log": True},
    "log and focal": {"log": True, "gamma": 1.5},
    "smooth": {"smooth": 0.7},
    "no background": {"background": False},
    "present": {"classes": "present"},
    "over image": {"over": "image"},
    "over class": {"over": "class"},
    "over image, present": {"over": "image", "classes": "present", "background": False},
    "over class, present": {"over": "class", "classes": "present", "gamma": 2.0},
}


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("kind", ["soft", "hard", "nothing valid"])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_mixture_in_three_launches_equals_the_definition(name, kind, weighted):
    logits = random_logits(3, 4, 37).to(DEVICE)
    target = soft_label(3, 4, 37) if kind == "soft" else class_map((3, 37), 4)
    if kind == "hard":
        # class 3 is absent, class 2 is in one image only, and one image is all background
        target = torch.where(target == 3, 0, target)
        target[1:] = torch.where(target[1:] == 2, 1, target[1:])
        target[2] = 0
    valid = torch.zeros(3, 37, dtype=torch.bool, device=DEVICE) if kind == "nothing valid" else None
    weight = torch.tensor([0.5, 1.0, 2.0, 0.0], device=DEVICE) if weighted else None
    options = LossOptions(alpha=0.7, beta=0.3, **MIXTURES[name])
    inputs = (logits, target.to(DEVICE), options, weight, valid)
    # the kernel computes a power as exp and log, which adds rounding errors
    torch.testing.assert_close(
        mixture_and_gradient(*inputs), defined_mixture_and_gradient(*inputs), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_the_mixture_of_the_most_classes_equals_the_definition(kind):
    shape = (1, MAX_FUSED_CLASSES, 7)
    target = soft_label(*shape) if kind == "soft" else class_map((1, 7), MAX_FUSED_CLASSES)
    inputs = random_logits(*shape).to(DEVICE), target.to(DEVICE)
    torch.testing.assert_close(
        mixture_and_gradient(*inputs), defined_mixture_and_gradient(*inputs), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("over", ["batch", "image"])
def test_many_partial_sums_are_added_up_before_the_loss(over, monkeypatch):
    logits, target = random_logits(2, 3, 5000).to(DEVICE), soft_label(2, 3, 5000).to(DEVICE)
    options = LossOptions(alpha=0.7, beta=0.3, over=over)
    few = mixture_and_gradient(logits, target, options)
    monkeypatch.setattr(plans, "MAX_LOSS_PARTIALS", 0)
    kernels.forget_plans()
    torch.testing.assert_close(mixture_and_gradient(logits, target, options), few)


def test_the_gradient_at_the_label_is_exactly_zero():
    options = LossOptions(alpha=0.7, beta=0.3, cross_entropy_weight=0, region_weight=1)
    prob = soft_label(1, 2, 64).to(DEVICE)
    total, _, gradient, _ = mixture_and_gradient(prob, prob, options, activation="none")
    assert total.item() == 0
    assert torch.count_nonzero(gradient) == 0


def test_the_total_can_be_modified_in_place_but_not_the_logits():
    leaf, target = random_logits(1, 2, 16).to(DEVICE).requires_grad_(), soft_label(1, 2, 16).to(DEVICE)
    logits = 2 * leaf
    total = fused.fused_total(logits, target, None, None, DICE_AND_ENTROPY, "softmax")
    total /= 4
    total.backward(retain_graph=True)
    assert leaf.grad.shape == leaf.shape
    logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_small_batches_need_three_launches(monkeypatch):
    """The loss kernel adds up their partial sums, and no program loops over tiles that do not exist."""
    monkeypatch.setattr(plans, "num_multiprocessors", num_multiprocessors)
    for shape, dtype in itertools.product(
        ((8, 2, 512, 512), (8, 3, 512, 512)), (torch.float32, torch.bfloat16)
    ):
        logits = torch.zeros(1, dtype=dtype).expand(shape)
        for target in (logits.float(), torch.zeros(1, dtype=torch.uint8).expand(8, 512, 512)):
            plan = plans.plan_of(logits, target, None, ALL_SUMS)
            assert plan.num_partials <= plans.MAX_LOSS_PARTIALS
            voxel = plans.plan_of(logits[..., :1, :1], target[..., :1, :1], None, ALL_SUMS)
            assert voxel.num_programs == 1


def test_the_integers_of_a_table_can_count_all_voxels_of_a_program():
    for _, tiling in tilings.HARD_FORWARD[1:]:
        num_voxels = tiling.voxel_block * tiling.num_tiles
        # the probabilities add up to less than the count of one voxel, and both sums fit in 63 bits
        assert num_voxels * index_sums.PROB_UNITS.value < index_sums.COUNT.value
        assert (num_voxels + 1) * index_sums.COUNT.value < 2**63
        assert num_voxels * index_sums.MAX_BIT_UNITS.value < 2**63


def test_the_version_of_triton_is_read_without_importing_it(monkeypatch, tmp_path):
    assert kernels_package._triton_version() == tuple(int(part) for part in triton.__version__.split(".")[:2])
    old_triton = tmp_path / "triton" / "__init__.py"
    old_triton.parent.mkdir()
    old_triton.write_text('"""Triton."""\n__version__ = "3.4.1"\n')
    monkeypatch.setattr(kernels_package, "find_spec", lambda name: spec_from_file_location(name, old_triton))
    assert kernels_package._triton_version() == (3, 4) < kernels_package.MIN_TRITON
    monkeypatch.setattr(kernels_package, "find_spec", lambda _: None)
    assert kernels_package._triton_version() == ()


COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from semidice.kernels import mixture, plans
from semidice.losses.options import LossOptions
from semidice.overlap import SumsOptions

FLOATS = ("alpha", "beta", "gamma", "smooth", "entropy_weight", "region_weight")

def compile_for_hopper(kernel):
    # in place of a launch: the types of the arguments, which are aligned as those of large tensors are
    def launch(*arguments, num_warps, **constants):
        named = dict(zip(kernel.arg_names, arguments)) | constants
        signature, numbers, divisible = {}, {}, {}
        for place, (name, value) in enumerate(named.items()):
            if value is None or name in constants:
                signature[name], numbers[place,] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                kinds = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.uint8: "*u8"}
                signature[name], divisible[place,] = kinds[value.dtype], [["tt.divisibility", 16]]
            elif name.endswith("stride_v"):
                signature[name], numbers[place,] = "constexpr", 1
            else:
                signature[name] = "fp32" if name in FLOATS else "i32"
                if name.endswith(("stride_n", "stride_c")):
                    divisible[place,] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=signature, constexprs=numbers, attrs=divisible)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        check_exponentials(compiled, constants)
    return type("Kernel", (), {"__getitem__": lambda self, grid: launch})()

def check_exponentials(compiled, constants):
    # the compiler may compute a tile twice, in two layouts, which is slow; only this count reveals it
    spec = constants.get("SPEC")
    if not hasattr(spec, "voxel_block"):
        return
    # the sums of more classes compute them again, to keep fewer registers
    again = 2 if "sums" in compiled.name and spec.num_classes > 160 else 1
    rows = sum(num_rows for _, num_rows in spec.chunks)
    elements = again * rows * spec.voxel_block // (32 * spec.num_warps)
    count = compiled.asm["ptx"].count("ex2.approx")
    assert count < 1.5 * elements + 2 * spec.vector, (compiled.name, spec, elements, count)

for module in (plans.sums, plans.index_sums, plans.gradient, mixture):
    for name in ("sums_kernel", "totals_kernel", "index_sums_kernel", "gradient_kernel", "loss_kernel"):
        if hasattr(module, name):
            setattr(module, name, compile_for_hopper(getattr(module, name)))
# one number of classes for every tiling, in one to three chunks; every option of the loss
CASES = (
    (3, "fp32", "soft", {}), (14, "fp32", "soft", {"log": True, "over": "image"}), (14, "bf16", "hard", {}),
    (64, "bf16", "hard", {"gamma": 2.0, "over": "class"}), (100, "fp32", "soft", {"classes": "present"}),
    (150, "bf16", "hard", {"background": False}), (150, "fp32", "soft", {}), (200, "bf16", "hard", {}),
    (256, "fp32", "hard", {}), (256, "fp32", "soft", {}),
)
for num_classes, kind, target, chosen in CASES:
    shape = (2, num_classes, 2**18)
    logits = torch.empty(1, dtype=torch.float32 if kind == "fp32" else torch.bfloat16).expand(shape)
    label = torch.empty(1).expand(shape)
    if target == "hard":
        label = torch.empty(1, dtype=torch.uint8).expand(2, 2**18)
    options, region = SumsOptions("softmax", "min", True), LossOptions(**chosen)
    plan = plans.plan_of(logits, label, None, options)
    spec = plans.loss_spec(plan, region)
    weight = None if chosen else torch.ones(num_classes)
    batch = logits, label, None
    for each in (spec, spec._replace(added_up=not spec.added_up)):
        _, _, workspace = plans.launch_loss(plan, each, batch, weight, (0.5,) * 6, parts=each is spec)
    plans.launch_gradient(plan, batch, workspace, torch.ones(()), torch.empty(1, num_classes, 1))
print("compiled")
"""


@pytest.mark.slow
def test_the_kernels_compile_for_hopper_without_a_gpu():
    """The interpreter accepts kernels that the compiler refuses, such as those with five warps."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False, env=environment
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.strip() == "compiled"


@needs_gpu
@pytest.mark.parametrize("shape", [(2, 3, 1000), (2, 14, 5000), (1, 150, 3000)], ids=str)
def test_a_captured_step_equals_the_eager_one_bit_for_bit(shape):
    logits, target = random_logits(*shape).to(DEVICE), soft_label(*shape).to(DEVICE)
    eager = mixture_and_gradient(logits, target)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mixture_and_gradient(logits, target)
    for result in captured:
        result.fill_(7)
    graph.replay()
    torch.testing.assert_close(captured, eager, rtol=0, atol=0)


@needs_gpu
@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize("num_classes", [2, 14, 33, 64, 100, 150, 256])
def test_sums_that_occupy_the_whole_gpu_equal_the_definition(num_classes, kind, monkeypatch):
    """All multiprocessors have programs with several tiles; only the gradient is a large tensor."""
    monkeypatch.setattr(plans, "num_multiprocessors", num_multiprocessors)
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (3, num_classes, 2**25 // num_classes // 3 + 1)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(shape, device=DEVICE, generator=generator).to(dtype)
        target = torch.randn(shape, device=DEVICE, generator=generator).softmax(1)
        if kind == "hard":
            target = target.argmax(1).to(torch.int16)
        actual = fused.fused_sums(logits, target, None, ALL_SUMS)
        expected = reference_sums(logits.double(), target, None, ALL_SUMS)
        pairs = zip((*actual.overlap, *actual[1:]), (*expected.overlap, *expected[1:]), strict=True)
        for actual_sum, expected_sum in pairs:
            torch.testing.assert_close(actual_sum.double(), expected_sum.double(), rtol=1e-5, atol=0.0)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        *_, gradient = mixture_and_gradient(logits, target)
        extra = torch.cuda.max_memory_allocated() - before - gradient.numel() * gradient.element_size()
        assert extra <= 2e6


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 2**30 + 7), (3, 2, 400_000_001), (1, 70, 31_000_001)], ids=str)
def test_more_than_two_to_the_31_elements_equal_the_definition(shape):
    """One such image, or several smaller ones; the definition is computed in parts."""
    logits = torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_()
    target = torch.randint(shape[1], (shape[0], shape[2]), device=DEVICE, dtype=torch.int16)
    logits.requires_grad_()
    sums = fused.fused_sums(logits, target, None, ALL_SUMS)
    parts = torch.stack([*sums.overlap, sums.entropy, sums.mass])
    incoming = torch.randn(4, *parts.shape[1:], device=DEVICE)
    (gradient,) = torch.autograd.grad(list(parts[:4]), logits, list(incoming))
    exact = torch.zeros_like(parts, dtype=torch.float64)
    step = 2**30 // (shape[0] * shape[1] * 8)
    for start in range(0, shape[2], step):
        part = slice(start, min(start + step, shape[2]))
        piece = logits.detach()[..., part].float().requires_grad_()
        piece_sums = reference_sums(piece, target[..., part], None, ALL_SUMS)
        exact += torch.stack([*piece_sums.overlap, piece_sums.entropy, piece_sums.mass]).detach()
        piece_gradient = reference_gradient(piece, target[..., part], None, ALL_SUMS, list(incoming))
        torch.testing.assert_close(gradient[..., part], piece_gradient.bfloat16().detach())
    # a billion float32 numbers, added in a different order
    torch.testing.assert_close(parts.double().detach(), exact, rtol=1e-4, atol=0)
