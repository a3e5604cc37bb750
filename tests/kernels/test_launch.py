"""A cached launch runs the same kernel that Triton would choose, with the same arguments.

The tests compare with Triton's own choice of what to compile for given arguments, which needs no GPU.
"""

import itertools
import math
import random
from importlib.util import spec_from_file_location

import pytest
import torch
from kernel_cases import forget_plans
from laws import class_map, random_logits, soft_label

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from semidice import SegmentationLoss, use_kernels
from semidice import kernels as kernels_package
from semidice.kernels import fused, gradient, launch, layout, sums
from semidice.kernels import mixture as mixture_kernel
from semidice.kernels.launch import Launch
from semidice.overlap.options import MixtureOptions, RegionOptions

KERNELS = {"sums_kernel": sums, "gradient_kernel": gradient, "loss_kernel": mixture_kernel}
STREAM = 77
OPTIONS = MixtureOptions("softmax", RegionOptions(alpha=0.5, beta=0.5))


class FakeCompiledKernel(CompiledKernel):
    """A compiled kernel for Triton's choice at the first launch; refuses arguments with another choice."""

    def __init__(self, kernel, choice):
        self.module, self.kernel, self.choice = None, kernel, choice
        self.function, self.packed_metadata = object(), object()

    def __getitem__(self, grid):
        def with_hooks(*arguments):
            self.kernel.num_with_hooks += 1
            self._check(grid, arguments)

        return with_hooks

    @property
    def run(self):
        def run(x, y, z, stream, function, metadata, described, before, after, *arguments):
            assert (stream, function, metadata) == (STREAM, self.function, self.packed_metadata)
            assert described is before is after is None
            self.kernel.num_direct += 1
            self._check((x, y, z), arguments)

        return run

    def _check(self, grid, arguments):
        tensors = self.kernel.tensors
        assert list(arguments[: len(tensors)]) == [None if t is None else t.data_ptr() for t in tensors]
        assert self.kernel.choice(grid, *tensors, *arguments[len(tensors) :]) == self.choice


class FakeKernel:
    """A replacement of a Triton kernel: computes nothing, but knows what Triton would compile."""

    def __init__(self, function):
        jit = JITFunction(function)
        self.arg_names = jit.arg_names
        self._bind = create_function_from_signature(
            jit.signature, jit.params, make_backend(GPUTarget("cuda", 90, 32))
        )
        self.tensors, self.num_public, self.num_direct, self.num_with_hooks = (), 0, 0, 0

    def choice(self, grid, *arguments):
        return grid, self._bind(*arguments)[1]

    def __getitem__(self, grid):
        def public_launch(*arguments, **options):
            self.num_public += 1
            return FakeCompiledKernel(self, self.choice(grid, *arguments))

        return public_launch


@pytest.fixture
def kernels(monkeypatch):
    """Replacements of the three kernels; each records the tensors of its latest launch."""
    replaced = []
    for name, module in KERNELS.items():
        replaced.append(FakeKernel(getattr(module, name).fn))
        monkeypatch.setattr(module, name, replaced[-1])
    call = Launch.__call__

    def recording_call(self, *tensors, **options):
        self._kernel.tensors = tensors
        call(self, *tensors, **options)

    monkeypatch.setattr(Launch, "__call__", recording_call)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    forget_plans()
    yield replaced
    forget_plans()


def shifted(tensor, offset):
    """The same values, stored `offset` elements after an aligned address."""
    memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
    view = memory[offset:].view(tensor.shape)
    return view.copy_(tensor)


def batches():
    """Sizes 1, 16 and primes, hard and soft targets, all types, aligned or not, several layouts."""
    for shape in ((1, 2, 1), (1, 16, 16), (2, 3, 17), (16, 2, 32), (2, 5, 4, 4), (3, 2, 1, 1)):
        logits = random_logits(*shape)
        hard = class_map((shape[0], *shape[2:]), shape[1])
        targets = [soft_label(*shape), soft_label(*shape).bfloat16(), hard, hard.to(torch.uint8)]
        for dtype, target, offset in itertools.product((torch.float32, torch.float16), targets, (0, 1)):
            for mask in (None, torch.ones_like(hard, dtype=torch.bool)):
                valid = mask if mask is None else shifted(mask, offset)
                yield shifted(logits.to(dtype), offset), target, valid, None
                yield logits.to(dtype), shifted(target, offset), valid, torch.ones(shape[1])
        if len(shape) == 4:
            yield logits.contiguous(memory_format=torch.channels_last), targets[0], None, None
            yield logits[..., ::2], targets[0][..., ::2], None, None


def launch_all(batch_list):
    for logits, target, valid, weight in batch_list:
        leaf = logits.detach().requires_grad_()
        fused.fused_mixture(leaf, target, valid, OPTIONS, weight, parts=True).total.backward()


def test_a_cached_kernel_is_the_one_that_triton_would_choose(kernels):
    repeated = 3 * list(batches())
    random.Random(0).shuffle(repeated)
    launch_all(repeated)
    for kernel in kernels:
        assert kernel.num_public + kernel.num_direct == len(repeated)
        # each batch occurs three times, and some differ only in properties that do not affect this kernel
        assert kernel.num_direct >= 2 / 3 * len(repeated)


def test_these_tests_detect_a_cache_key_without_alignment(kernels, monkeypatch):
    monkeypatch.setattr(launch, "_ALIGNMENT", 1)
    with pytest.raises(AssertionError):
        launch_all(batches())


def test_integer_options_are_passed_to_triton_as_floats(kernels):
    logits, target = random_logits(1, 2, 16), soft_label(1, 2, 16)
    for alpha in (1, 0.5, 16, 2**40):
        options = OPTIONS._replace(region=RegionOptions(alpha=alpha, beta=alpha))
        fused.fused_mixture(logits, target, None, options, None, parts=True)
    assert (kernels[2].num_public, kernels[2].num_direct) == (1, 3)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chained", [True, False])
def test_launch_hooks_are_called_while_they_are_set(kernels, monkeypatch, name, chained):
    batch = (random_logits(1, 2, 16), soft_label(1, 2, 16), None, None)
    launch_all(2 * [batch])
    with monkeypatch.context() as patch:
        hook = triton.knobs.HookChain() if chained else print
        patch.setattr(triton.knobs.runtime, name, hook)
        if chained:
            # an empty chain calls nothing
            launch_all([batch])
            assert [kernel.num_with_hooks for kernel in kernels] == [0, 0, 0]
            hook.add(print)
        launch_all([batch])
    launch_all([batch])
    assert [kernel.num_with_hooks for kernel in kernels] == [1, 1, 1]
    assert [kernel.num_direct for kernel in kernels] == 3 * [2 + chained]


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (triton, "__version__", "3.5.1"),
        (triton, "__version__", "3.10.0"),
        (triton, "__version__", "4.0.0"),
        (torch.version, "hip", "6.4"),
    ],
)
def test_untested_versions_use_the_public_launch(kernels, monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, value)
    launch_all(2 * [(random_logits(1, 2, 16), soft_label(1, 2, 16), None, None)])
    assert [(kernel.num_public, kernel.num_direct) for kernel in kernels] == [(2, 0)] * 3


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0", triton.__version__])
def test_tested_versions_use_the_private_launch(kernels, monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    launch_all(2 * [(random_logits(1, 2, 16), soft_label(1, 2, 16), None, None)])
    assert [(kernel.num_public, kernel.num_direct) for kernel in kernels] == [(1, 1)] * 3


class MissingAttribute:
    """An attribute that raises AttributeError, as if a new version of Triton had removed it."""

    def __get__(self, owner, kind):
        raise AttributeError


@pytest.mark.parametrize("name", ["run", "function", "packed_metadata"])
def test_the_public_launch_is_used_if_an_attribute_is_missing(kernels, monkeypatch, name):
    monkeypatch.setattr(FakeCompiledKernel, name, MissingAttribute(), raising=False)
    monkeypatch.setattr(
        FakeCompiledKernel, "__init__", lambda self, kernel, choice: setattr(self, "module", None)
    )
    launch_all(2 * [(random_logits(1, 2, 16), soft_label(1, 2, 16), None, None)])
    assert [(kernel.num_public, kernel.num_direct) for kernel in kernels] == [(2, 0)] * 3


def test_unknown_constants_are_refused():
    with pytest.raises(ValueError, match=r"constants of the kernel are SPEC; got FORM"):
        Launch(sums.sums_kernel, (1,), (), num_warps=1, FORM=0)


def layouts():
    """Tensors (2, 3, *space) and (1, 3, *space) with many strides; some can be flattened without a copy."""
    for num_images, space in itertools.product((1, 2), ((), (4,), (4, 6), (4, 1, 6), (1, 1), (2, 4, 6))):
        tensor = torch.arange(num_images * 3 * math.prod(space)).view(num_images, 3, *space)
        yield tensor
        yield tensor.transpose(0, 1).contiguous().transpose(0, 1)
        yield tensor.movedim(1, -1).contiguous().movedim(-1, 1)
        yield tensor[:, :1].expand(num_images, 3, *space)
        if space:
            yield tensor[..., ::2]
            yield tensor.transpose(2, -1)
            yield tensor[..., :1].expand(num_images, 3, *space)
            yield tensor.flatten(2)[:, :, :1].expand(num_images, 3, 12)


def test_flattening_copies_only_where_torch_copies():
    num_copied = 0
    for tensor in layouts():
        flat = layout._flat(tensor, 2)
        stride = layout.flat_stride(tensor.shape, tensor.stride(), 2)
        assert (stride is None) == (flat.data_ptr() != tensor.data_ptr())
        num_copied += stride is None
        if stride is not None:
            assert torch.equal(tensor.as_strided(flat.shape, stride), flat)
    assert num_copied > 0


def test_a_mask_is_copied_unless_it_is_contiguous():
    num_kept = 0
    for tensor in layouts():
        mask = tensor[:, 1] % 2 == 0
        for valid in (mask, mask.expand(3, *mask.shape)[1], (tensor % 2 == 0)[:, 1]):
            logits, target = torch.zeros(tensor.shape), torch.zeros(valid.shape, dtype=torch.long)
            inputs = layout.flat_inputs(logits, target, valid, OPTIONS.sums)
            assert torch.equal(inputs.valid.flatten(), valid.flatten())
            assert inputs.valid.is_contiguous()
            num_kept += inputs.valid is valid
    assert num_kept > 0


def mixture(logits, *, parts=True):
    return fused.fused_mixture(logits, soft_label(1, 2, 16), None, OPTIONS, None, parts=parts)


def test_total_and_parts_can_be_modified_in_place(kernels):
    leaf = random_logits(1, 2, 16).requires_grad_()
    total, (entropy, region) = mixture(leaf)
    assert not entropy.requires_grad
    assert not region.requires_grad
    total /= 4
    entropy *= 2
    total.backward()
    assert leaf.grad.shape == leaf.shape


def test_only_the_total_is_returned_without_parts(kernels):
    losses = mixture(random_logits(1, 2, 16).requires_grad_(), parts=False)
    assert losses.total.requires_grad
    assert losses.terms == ()


def test_backward_refuses_logits_modified_after_the_forward_pass(kernels):
    logits = 2 * random_logits(1, 2, 16).requires_grad_()
    total, *_ = mixture(logits)
    logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.gpu
def test_a_cached_launch_gives_the_same_results():
    inputs = [[None if t is None else t.cuda() for t in batch] for batch in batches()]
    results = []
    for _ in range(3):
        outputs = []
        for logits, target, valid, weight in inputs:
            leaf = logits.detach().requires_grad_()
            total = fused.fused_mixture(leaf, target, valid, OPTIONS, weight, parts=True).total
            total.backward()
            outputs += [total.detach(), leaf.grad]
        results.append(outputs)
    for repeated in results[1:]:
        torch.testing.assert_close(repeated, results[0], rtol=0, atol=0, equal_nan=True)
    for plan, _ in fused._plans.values():
        assert len(plan._gradient.launch._callers) >= 1


@pytest.mark.gpu
def test_a_mask_on_the_cpu_is_refused_after_one_on_the_gpu():
    logits, target = random_logits(1, 2, 16).cuda(), soft_label(1, 2, 16).cuda()
    valid = torch.ones(1, 16, dtype=torch.bool, device="cuda")
    for _ in range(2):
        fused.fused_mixture(logits, target, valid, OPTIONS, None, parts=True)
    with pytest.raises(ValueError, match="valid is on cpu but prediction on cuda"):
        fused.fused_mixture(logits, target, valid.cpu(), OPTIONS, None, parts=True)


def test_tensors_of_the_same_kind_are_checked_once(kernels, monkeypatch):
    checked = []
    check_batch = fused.check_batch

    def check(*batch):
        checked.append(batch)
        return check_batch(*batch)

    monkeypatch.setattr(fused, "check_batch", check)
    kinds = [
        (random_logits(1, 2, 16), soft_label(1, 2, 16)),
        (random_logits(1, 2, 17), soft_label(1, 2, 17)),
        (random_logits(1, 2, 16), class_map((1, 16), 2)),
        (random_logits(1, 2, 16).half(), soft_label(1, 2, 16)),
        (random_logits(1, 2, 32)[..., ::2], soft_label(1, 2, 16)),
    ]
    for logits, target in 3 * kinds:
        fused.fused_mixture(logits, target, None, OPTIONS, None, parts=True)
    assert len(checked) == len(kinds)
    # a batch that is refused has no plan, so it is checked every time
    for _ in range(2):
        with pytest.raises(ValueError, match="differ in shape"):
            fused.fused_mixture(
                random_logits(1, 2, 16), soft_label(1, 2, 17), None, OPTIONS, None, parts=True
            )
    assert len(checked) == len(kinds) + 2


def test_a_target_in_another_form_takes_the_plan_of_the_usual_one(kernels):
    logits, index = random_logits(1, 2, 19), class_map((1, 19), 2)
    fused.fused_mixture(logits, index, None, OPTIONS, None, parts=True)
    plans = dict(fused._plans)
    fused.fused_mixture(logits, index[:, None], None, OPTIONS, None, parts=True)
    assert fused._plans == plans


@pytest.mark.gpu
def test_changed_options_are_respected_for_tensors_of_a_known_kind():
    """The kind leaves out weights, `use_kernels` and `target.requires_grad`; all of them are respected."""
    logits, target = random_logits(2, 3, 40).cuda(), soft_label(2, 3, 40).cuda()
    loss = SegmentationLoss()
    forget_plans()
    first = loss(logits, target)
    loss.region_weight = 0.25
    torch.testing.assert_close(first - loss(logits, target), 0.5 * loss.region(logits, target))
    differentiable_target = target.clone().requires_grad_()
    loss(logits, differentiable_target).backward()
    assert differentiable_target.grad is not None
    torch.func.vmap(loss)(logits.unsqueeze(1), target.unsqueeze(1))
    use_kernels(False)
    try:
        loss(logits[:1], target[:1])
    finally:
        use_kernels(True)
    # one plan for the mixture, and one for the region loss alone
    assert len(fused._plans) == 2
    with pytest.raises(ValueError, match="a float target needs a class axis"):
        loss(logits, target[:, 0])
    with pytest.raises(ValueError, match="valid is on cpu but prediction on cuda"):
        loss(logits, target, torch.ones(2, 40, dtype=torch.bool))


def test_the_version_of_triton_is_read_without_importing_it(monkeypatch, tmp_path):
    assert kernels_package._triton_version() == tuple(int(part) for part in triton.__version__.split(".")[:2])
    old_triton = tmp_path / "triton" / "__init__.py"
    old_triton.parent.mkdir()
    old_triton.write_text('"""Triton."""\n__version__ = "3.4.1"\n')
    monkeypatch.setattr(kernels_package, "find_spec", lambda name: spec_from_file_location(name, old_triton))
    assert kernels_package._triton_version() == (3, 4) < kernels_package.MIN_TRITON
    monkeypatch.setattr(kernels_package, "find_spec", lambda _: None)
    assert kernels_package._triton_version() == ()
