"""A device that is not there: what a GPU would refuse, without a GPU.

Inside `other_device()`, tensors on the device "meta" compute on the CPU and keep their numbers. An
operation that mixes them with CPU tensors of one dimension or more, or fills them from a CPU
generator, is refused as CUDA refuses it. Operations and synchronisations, where Python has to wait
for a number from the device, are counted.
"""
from collections import Counter

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
MOVES = ("_to_copy", "copy_", "_copy_from")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")  # CUDA takes a CPU index
# Python waits for these: a number, or a shape that depends on numbers.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique",
         "_unique2", "bincount")
VIEWS = ("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "slice",
         "select", "unsqueeze", "squeeze", "alias", "detach", "split", "unbind", "narrow", "chunk",
         "as_strided", "view_as_complex", "view_as_real", "split_with_sizes", "lift_fresh")


make_tensor, inference_mode, rms_norm = torch.tensor, torch.inference_mode, F.rms_norm


class OnDevice(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, layout=inner.layout, device=DEVICE,
            requires_grad=inner.requires_grad)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"OnDevice({self.inner})"

    def tolist(self):
        counts["waits"] += 1
        return self.inner.tolist()

    def new_tensor(self, values, **options):
        return OnDevice(make_tensor(values, **{"dtype": self.dtype, **options}))

    def __getitem__(self, index):
        """A list becomes a tensor of the device, which would pass by the mode."""
        parts = index if isinstance(index, tuple) else (index,)
        parts = [OnDevice(make_tensor(part)) if isinstance(part, list) else part for part in parts]
        return super().__getitem__(tuple(parts))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def unwrap(value):
    return value.inner if isinstance(value, OnDevice) else value


def is_device(value) -> bool:
    return value is not None and torch.device(value).type == DEVICE.type


counts = Counter()  # operations and waits of the present block


def compute(func, args, kwargs):
    name = func.overloadpacket.__name__
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    indices = tree_leaves(args[1]) if name in INDEXING else []
    theirs = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.ndim
              and not any(tensor is index for index in indices)]
    asked = kwargs.get("device")
    on_device = is_device(asked) if asked is not None else bool(ours)
    if ours and theirs and name not in MOVES:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    if on_device and name not in MOVES and any(isinstance(leaf, torch.Generator)
                                               for leaf in leaves):
        raise RuntimeError(f"{name}: expected a generator of the device, found one of the CPU")
    if ours and name not in VIEWS:
        counts["operations"] += 1
    by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
    if ours and (name in WAITS or by_mask or name == "_to_copy" and not on_device):
        counts["waits"] += 1
    if any(tensor.is_meta for tensor in tensors if not isinstance(tensor, OnDevice)):
        raise RuntimeError(f"{name}: a tensor of the device that this test does not know of")
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    if func._schema.is_mutable and tensors and isinstance(result, torch.Tensor):
        return args[0] if args else kwargs.get("out")
    if not on_device:
        return result
    return tree_map(lambda value: OnDevice(value) if isinstance(value, torch.Tensor) else value,
                    result)


def tensor_like_any_other(values, *, device=None, **options):
    """torch.tensor(..., device="meta") passes by the mode."""
    made = make_tensor(values, **options)
    return made if device is None else made.to(device)


def one_kernel(x, *arguments):
    """rms_norm is one operation on a GPU, several on a CPU."""
    if torch.is_grad_enabled() or not isinstance(x, OnDevice):
        return rms_norm(x, *arguments)
    counts["operations"] += 1
    return OnDevice(rms_norm(x.inner, *map(unwrap, arguments)))


class other_device(TorchDispatchMode):
    def __enter__(self):
        counts.clear()
        torch.tensor = tensor_like_any_other
        torch.inference_mode = torch.no_grad  # wrapped tensors cannot be inference tensors
        F.rms_norm = one_kernel
        return super().__enter__()

    def __exit__(self, *error):
        torch.tensor, torch.inference_mode, F.rms_norm = make_tensor, inference_mode, rms_norm
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})
