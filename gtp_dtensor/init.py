"""Initialisation that does not depend on the topology.

DTensor's own random numbers do: on a CPU every shard of a weight gets the same ones, on a GPU only the first shard gets
what an unsharded run would. Writes into a part of a DTensor are lost where the part is a gathered copy, and DTensors do
not mix with plain tensors. Here every rank works on the logical tensor, as an unsharded run with the same seed does,
and keeps its shard. Ranks that are to hold the same model need the same seed.

[Note: twins]
    twin      a plain tensor of a weight's logical shape. Random numbers are drawn on it, views of the weight are
              views of it (``_Part``), functions that write into either run on it
    own part  what this rank stores of it. Read from the local shard before each function that uses the twin, written
              to it right after each function that wrote: the shard is never behind
    complete  the other ranks' parts are up to date too. A twin becomes so by a gather, once something needs it (most
              writes do not), or by a function that overwrites all of it
    current   the twin that was used last. Another one's use lets go of it, so that a model is never whole in memory;
              views that are still held keep theirs alive and working

Whether to gather may depend only on what all ranks know alike: which functions were called on which weights. Garbage
collection is none of it, so a twin that is no longer current counts as incomplete.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, handle_torch_function
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from .layout import share_storage


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_INIT_FUNCTIONS = {
    name: function
    for name, function in vars(nn.init).items()
    if name.endswith("_") and not name.startswith("_") and callable(function)
}
_RANDOM = _names("normal_ uniform_ bernoulli_ exponential_ random_ cauchy_ log_normal_ geometric_")
_RANDOM_FUNCTIONS = _names("bernoulli normal poisson binomial multinomial")
_OVERWRITES = _RANDOM | _INIT_FUNCTIONS.keys() | _names("zero_ fill_ copy_")  # without reading; all of their tensor
# Writes whose elements depend on nothing but that element and the other arguments.
_ELEMENTWISE = _OVERWRITES | _names(
    """__setitem__ add_ sub_ subtract_ mul_ multiply_ div_ divide_ true_divide_ floor_divide_ remainder_ fmod_ pow_
    float_power_ addcmul_ addcdiv_ lerp_ clamp_ clip_ clamp_min_ clamp_max_ neg_ negative_ abs_ absolute_ sign_ sgn_
    reciprocal_ square_ sqrt_ rsqrt_ exp_ exp2_ expm1_ log_ log2_ log10_ log1p_ sin_ cos_ tan_ asin_ acos_ atan_ sinh_
    cosh_ tanh_ asinh_ acosh_ atanh_ erf_ erfc_ erfinv_ sigmoid_ logit_ relu_ threshold_ floor_ ceil_ round_ trunc_
    frac_ nan_to_num_ masked_fill_ masked_scatter_ index_fill_ index_copy_ index_add_ index_put_ put_ scatter_
    scatter_add_ tril_ triu_ fill_diagonal_ addmm_ addmv_ addr_ addbmm_ baddbmm_"""
)
# Of these, with numbers for arguments, a shard gets the same bits however it is cut.
_EXACT = _names("zero_ fill_ mul_ div_ add_ sub_ clamp_ clamp_min_ clamp_max_ neg_ abs_")
_SHAPE_WRITES = _names("t_ transpose_ squeeze_ unsqueeze_ swapaxes_ swapdims_ as_strided_ resize_ resize_as_ set_")
_NO_WRITES = _names("requires_grad_ share_memory_ rename_ detach_ __int__ __index__ __invert__ __iter__")
_LIKE = _names("new_empty new_zeros new_ones new_full new_tensor new_empty_strided rand_like randn_like randint_like")
_METADATA = _LIKE | _names(
    """size stride dim ndimension numel nelement storage_offset element_size get_device is_contiguous is_floating_point
    is_complex is_signed is_set_to __len__ data_ptr untyped_storage requires_grad_ register_hook __hash__"""
)
_VIEW_NAMES = _names("__getitem__ atleast_1d atleast_2d atleast_3d broadcast_tensors meshgrid einsum")
_VIEW_GETTERS = _names("T mT H mH real imag")
_SHAPED_AS = _names("view_as reshape_as expand_as")  # what is asked of the other argument
_SAME = _names("detach alias contiguous to type_as")  # the tensor itself or a copy of all of it: stays a DTensor
_REDUCTIONS = _names(
    """norm linalg_norm linalg_vector_norm linalg_matrix_norm sum mean std var std_mean var_mean max min amax amin
    aminmax prod median any all"""
)


@functools.cache
def _is_view(name: str) -> bool:
    """Whether the function may return a view of its first argument, as torch's schemas tell."""
    packet = None if name.startswith("_") else getattr(torch.ops.aten, name, None)
    if packet is None:
        return name in _VIEW_NAMES
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    aliases = [result.alias_info for schema in schemas for result in schema.returns]
    return name in _VIEW_NAMES or any(alias is not None and not alias.is_write for alias in aliases)


def _is_write(name: str) -> bool:
    """Whether the function writes into its first argument."""
    in_place = name.startswith("__i") or name == "__setitem__" if name.endswith("__") else name.endswith("_")
    return in_place and name not in _NO_WRITES


def _name_of(function: Callable) -> str:
    """Of a property: its own, with "set " before it for an assignment."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        return ("set " if name == "__set__" else "") + getattr(function.__self__, "__name__", "")
    return name


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_plainly_cut(tensor: DTensor) -> bool:
    """False with such as FSDP2's strided shards."""
    return all(type(p) is Shard or p.is_replicate() for p in tensor.placements)


def local_part(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of the logical tensor ``full``, cut as ``like`` is. A view where the placements are plain."""
    if not _is_plainly_cut(like):
        return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)._local_tensor
    coordinate = like.device_mesh.get_coordinate()
    for axis, placement in enumerate(like.placements):
        if placement.is_shard():
            size, dim = like.device_mesh.size(axis), placement.dim
            chunk = -(-full.shape[dim] // size)
            start = min(coordinate[axis] * chunk, full.shape[dim])
            full = full.narrow(dim, start, min(chunk, full.shape[dim] - start))
    return full


class _Twin:
    """The logical tensor of one weight; see [Note: twins]. Held by the block while it is current, and by its parts."""

    def __init__(self, weight: DTensor, block: _LogicalInit) -> None:
        local = weight._local_tensor
        self.weight, self.block, self.local = weight, block, local
        self.name = (
            f"weight of shape {tuple(weight.shape)} with placements {tuple(weight.placements)} on mesh axes "
            f"{weight.device_mesh.mesh_dim_names}"
        )
        if any(p.is_partial() for p in weight.placements):
            raise RuntimeError(f"logical_init: cannot write into a {self.name}: its ranks hold terms of a sum")
        mesh = weight.device_mesh
        # Where this rank has all of it, the twin is the local tensor: nothing to copy, and views stay good for ever.
        self.is_local = _is_plainly_cut(weight) and all(
            p.is_replicate() or mesh.size(axis) == 1 for axis, p in enumerate(weight.placements)
        )
        with torch.inference_mode(False):  # inference tensors count no versions
            if self.is_local:
                self.full = local.detach()
            else:
                self.full = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=local.device)
            self.own = local_part(self.full, weight) if _is_plainly_cut(weight) else None
        self.is_complete = False
        self._version, self._local_version = _version(self.full), _version(local)

    def refresh(self, whole: bool) -> None:
        """Bring the own part, or all of the twin, up to date. The latter may be a collective."""
        if self.is_local:
            return
        self.write_back()  # what was written past the mode
        if whole and not self.is_complete:
            with torch.inference_mode(False), torch.no_grad():
                self.full.copy_(self.weight.detach().full_tensor())
            self.is_complete = True
        elif self.own is not None:
            self.own.copy_(self.local)
        elif self.is_complete and _version(self.local) != self._local_version:
            raise RuntimeError(
                f"logical_init: the local tensor of a {self.name} was written while a part of it was in use: write "
                "into the DTensor instead"
            )
        self._version, self._local_version = _version(self.full), _version(self.local)

    def write_back(self) -> None:
        """What was written into the twin lands in this rank's shard."""
        if self.full.shape != self.weight.shape:  # torch resizes out=
            raise RuntimeError(f"logical_init: a {self.name} cannot take shape {tuple(self.full.shape)}")
        if self.is_local or _version(self.full) == self._version:
            return
        with torch.no_grad():
            self.local.copy_(local_part(self.full, self.weight))
        self._version, self._local_version = _version(self.full), _version(self.local)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of the twin."""
        return tensor.layout is torch.strided and share_storage(tensor, self.full) and not self.is_local


_Twins = dict[int, tuple[torch.Tensor, _Twin]]  # by id of a tensor: the tensor, and its twin


class _Part(torch.Tensor):
    """A view of a twin. Functions of it go to the block that made it, also where the mode does not see them."""

    _twin: _Twin

    @classmethod
    def of(cls, view: torch.Tensor, twin: _Twin) -> _Part:
        """``view`` of ``twin``'s tensor as a part."""
        part = view.as_subclass(cls)
        part._twin = twin
        return part

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        part = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Part))
        return part._twin.block.run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.clone()

    def __repr__(self) -> str:
        return f"<part of shape {tuple(self.shape)} of a {self._twin.name}>"


class _Call:
    """A function call, and what it does to which of its tensors."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict) -> None:
        name = _name_of(function)
        if name == "data":  # detach() shares the version counter, by which writes into parts are told
            function, name = function if isinstance(args[0], DTensor) else torch.Tensor.detach, "detach"
        elif name == "set data" and isinstance(args[0], DTensor):
            weight, value = args
            if value.shape != weight.shape or value.dtype != weight.dtype:
                raise RuntimeError(
                    f"logical_init: .data of a weight of shape {tuple(weight.shape)}, {weight.dtype}, cannot become "
                    f"one of shape {tuple(value.shape)}, {value.dtype}: assign a tensor of the weight's own"
                )
            function, name = torch.Tensor.copy_, "copy_"
        self.function, self.name, self.args, self.kwargs = function, name, args, kwargs
        self.tensors = _tensors((args, kwargs))
        first = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        first = first if isinstance(first, torch.Tensor) else None
        out = kwargs.get("out")
        is_write = _is_write(name) or kwargs.get("inplace") is True
        self.target = out if isinstance(out, torch.Tensor) else first if is_write else None
        self.is_view = first is not None and self.target is None and (name in _VIEW_GETTERS or _is_view(name))
        self.first = first
        self.overwrites = self.target is not None and (name in _OVERWRITES or "out" in kwargs)
        is_metadata = name in _METADATA or _name_of(function) != getattr(function, "__name__", "")  # or a property
        self.is_metadata = is_metadata and self.target is None
        # The tensor whose old elements the function has no use for
        self.unread = None
        if self.overwrites or (self.target is not None and name in _ELEMENTWISE):
            self.unread = self.target
        elif self.is_view or self.is_metadata:
            self.unread = first
        if sum(tensor is self.unread for tensor in self.tensors) > 1:
            self.unread = None

    @property
    def is_mixed(self) -> bool:
        """Whether DTensors meet plain tensors with more than one element, which DTensor refuses."""
        return any(not isinstance(t, DTensor) and t.numel() > 1 for t in self.tensors)

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)


class _LogicalInit(TorchFunctionMode):
    """Sends functions of DTensors that draw, write, or make views to their twins."""

    def __init__(self) -> None:
        super().__init__()
        self._is_open = True
        self._current: _Twin | None = None
        self._twins = WeakTensorKeyDictionary()  # weight: weak reference to its twin
        # DTensors that were computed from weights: weak reference to the weight whose memory they are, or None
        self._known = WeakTensorKeyDictionary()
        self._copies = WeakTensorKeyDictionary()  # DTensors that are copies where a plain tensor would be a view

    def close(self) -> None:
        """No part may be used any more: nobody would bring it up to date, or see what is written."""
        for reference in list(self._twins.values()):
            twin = reference()
            if twin is not None:
                twin.write_back()
        self._is_open, self._current = False, None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        if any(isinstance(tensor, _Part) for tensor in tensors):
            return self.run(func, args, kwargs)
        if all(tensor.is_meta or not isinstance(tensor, DTensor) for tensor in tensors):
            return func(*args, **kwargs)
        call = _Call(func, args, kwargs)
        return self.run(func, args, kwargs) if self._is_logical(call) else self._run_on_shards(call)

    def _weight_of(self, tensor: torch.Tensor | None) -> DTensor | None:
        """The weight that ``tensor`` is, in the memory of. None: an activation, say, which is let alone."""
        if not isinstance(tensor, DTensor):
            return None
        reference = self._known.get(tensor)
        if reference is not None:
            return reference()
        return tensor if isinstance(tensor, nn.Parameter) or tensor in self._known else None

    def _is_logical(self, call: _Call) -> bool:
        """Whether a function of DTensors and no parts has to run on twins."""
        name = call.name
        if name.startswith(("_foreach_", "_fused_")):  # on twins, all weights were whole at a time
            return False
        weight = self._weight_of(call.target)
        if isinstance(call.target, DTensor):
            if call.target in self._copies:
                raise RuntimeError(
                    f"logical_init: {name}() would write into a gathered copy of a part, {tuple(call.target.shape)}, "
                    "of a DTensor, and be lost: take the part of a parameter or its .data, inside logical_init()"
                )
            if weight is None:
                return name in _RANDOM or name in _INIT_FUNCTIONS or name == "__setitem__" or call.is_mixed
            is_current = self._current is not None and self._current.weight is weight
            return is_current or len(call.tensors) > 1 or name not in _EXACT or "alpha" in call.kwargs
        if call.target is None and self._weight_of(call.first) is not None:
            if (call.is_view and name not in _SAME) or name in _LIKE or name == "__iter__":
                return True
        if call.needs_grad:  # a forward inside the block
            return False
        if name in _REDUCTIONS | _RANDOM_FUNCTIONS:  # of weights alone: an activation's are none of ours
            return all(self._weight_of(tensor) is not None for tensor in call.tensors)
        return call.is_mixed and not call.is_metadata

    def _run_on_shards(self, call: _Call) -> object:
        """As DTensor does it. Remembers what the results are."""
        result = call.function(*call.args, **call.kwargs)
        if _is_write(call.name) or call.target is not None:
            if self._current is not None and any(self._weight_of(t) is self._current.weight for t in call.tensors):
                self._current.is_complete = False
        weights = [self._weight_of(tensor) for tensor in call.tensors]
        for tensor in _tensors(result):
            if not isinstance(tensor, DTensor) or any(tensor is given for given in call.tensors):
                continue
            local = tensor._local_tensor
            if all(weight is not None for weight in weights):
                if any(p.is_partial() for p in tensor.placements):
                    continue
                weight = weights[0]
                is_same = share_storage(local, weight._local_tensor) and tensor._spec == weight._spec
                self._known[tensor] = weakref.ref(weight) if is_same else None
            elif call.is_view and call.name not in _SAME:
                if call.first in self._copies or not share_storage(local, call.first._local_tensor):
                    self._copies[tensor] = True
        return result

    def run(self, function: Callable, args: tuple, kwargs: dict) -> object:
        """``function`` of twins in place of weights and of views of twins in place of parts."""
        if _name_of(function) == "__iter__":
            return iter(self.run(torch.unbind, args, kwargs))
        call = _Call(function, args, kwargs)
        if call.is_metadata and not call.is_view and call.name not in _LIKE:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            twins = self._twins_of(call)
            plain = {
                key: tensor.as_subclass(torch.Tensor) if isinstance(tensor, _Part) else twin.full
                for key, (tensor, twin) in twins.items()
            }
            self._refresh(call, twins)
        args, kwargs = tree_map(lambda leaf: plain.get(id(leaf), leaf), (call.args, call.kwargs))
        try:
            with contextlib.nullcontext() if call.target is None else torch.no_grad():
                result = call.function(*args, **kwargs)
                if call.is_view and id(call.first) in twins:
                    twin = twins[id(call.first)][1]
                    if not (twin.is_complete or all(map(twin.owns, _tensors(result)))):  # it had to copy
                        self._refresh(call, twins, whole=True)
                        result = call.function(*args, **kwargs)
        finally:
            for _, twin in twins.values():
                twin.is_complete = twin.is_complete and twin is self._current
                twin.write_back()
        if call.overwrites and isinstance(call.target, DTensor):
            twins[id(call.target)][1].is_complete = True
        given = {id(plain[key]): tensor for key, (tensor, _) in reversed(twins.items())}
        return tree_map(lambda leaf: self._wrap(leaf, given, twins), result)

    def _twins_of(self, call: _Call) -> _Twins:
        """Of all parts and DTensors in ``call``. That of its first tensor becomes current."""
        tensors = [tensor for tensor in call.tensors if isinstance(tensor, (_Part, DTensor))]
        if call.name in _SHAPE_WRITES:
            raise RuntimeError(
                f"logical_init: {call.name}() would change the shape or memory of a weight, or part of one, of shape "
                f"{tuple(tensors[0].shape)} in place: use the function without an underscore, or copy_()"
            )
        living = [self._living_twin(tensor, call) for tensor in tensors]
        if self._current is not None and all(twin is not self._current for twin in living):
            self._current.write_back()
            self._current.is_complete = False
            self._current = None  # before another one takes memory
        # Looked up again: a tensor and its detach() share the twin that is made for the first of them.
        twins = [self._living_twin(tensor, call) or self._new_twin(tensor) for tensor in tensors]
        found = {id(tensor): (tensor, twin) for tensor, twin in zip(tensors, twins)}
        main = next((t for t in (call.target, call.first) if id(t) in found), tensors[0])
        self._current = found[id(main)][1]
        return found

    def _living_twin(self, tensor: _Part | DTensor, call: _Call) -> _Twin | None:
        if isinstance(tensor, _Part):
            if not tensor._twin.block._is_open:
                raise RuntimeError(
                    f"logical_init: {call.name}() of a part of a {tensor._twin.name}: the part was taken inside "
                    "logical_init(), which has ended, and is no view of the weight any more: take it again, inside"
                )
            return tensor._twin
        weight = self._weight_of(tensor)
        reference = None if weight is None else self._twins.get(weight)
        twin = None if reference is None else reference()
        # to_empty() puts another local tensor into the same parameter
        return twin if twin is not None and twin.local is weight._local_tensor else None

    def _new_twin(self, tensor: DTensor) -> _Twin:
        weight = self._weight_of(tensor)
        twin = _Twin(tensor if weight is None else weight, self)
        if weight is not None:
            self._twins[weight] = weakref.ref(twin)
        return twin

    def _refresh(self, call: _Call, twins: _Twins, whole: bool = False) -> None:
        """Bring up to date what ``call`` reads of each twin, and the own part of those it writes into."""
        sources = () if call.name in _SHAPED_AS and not whole else twins.values()
        read = {twin for tensor, twin in sources if whole or tensor is not call.unread}
        with torch.no_grad():
            is_written = call.target is not None and not (call.overwrites and isinstance(call.target, DTensor))
            for twin in dict.fromkeys(twin for _, twin in twins.values()):
                twin.refresh(whole=twin in read or (is_written and twin.own is None))

    def _wrap(self, leaf: object, given: dict[int, torch.Tensor], twins: _Twins) -> object:
        """A result as the caller gets it: the tensor that was passed in, a part, or as it is."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in given:
            return given[id(leaf)]
        for _, twin in twins.values():
            if twin.owns(leaf):
                return _Part.of(leaf, twin)
        return leaf


def _is_inside() -> bool:
    return any(isinstance(mode, _LogicalInit) for mode in _get_current_function_mode_stack())


def _whole(function: Callable) -> Callable:
    """An init function that reaches the mode as one call, before it asks the tensor for anything. Outside of a block
    (something imported it by name inside) it is the function itself."""

    @functools.wraps(function)
    def wrapper(tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if isinstance(tensor, (DTensor, _Part)) and not tensor.is_meta and _is_inside():
            return handle_torch_function(wrapper, (tensor,), tensor, *args, **kwargs)
        return function(tensor, *args, **kwargs)

    return wrapper


@contextlib.contextmanager
def logical_init() -> Iterator[None]:
    """Inside, functions that write into DTensor parameters give what they would give without sharding.

    These are the functions of ``torch.nn.init``, also those imported by name, in-place functions, random or not, with
    plain tensors too, assignments to elements and to ``.data``, and ``out=``; of a weight, of its ``.data`` and
    ``detach()``, and of views of these. Views are plain tensors of the logical shape through which no gradient flows.
    Every rank draws the whole logical tensor with torch's default generator and keeps its part, so with equal seeds
    the logical weights are those of an unsharded run on the same kind of device. Collective where a value depends on
    elements of other ranks (``w.t().mm(w)``, say); draws and elementwise writes are not. Peak extra memory: the largest
    weight, twice while it is gathered, and each weight that views are held of. ``reset_parameters()`` of a sharded
    module enters this by itself; wrap an ``init_weights`` of your own in it::

        model.to_empty(device=device)
        with logical_init():
            model.init_weights()

    Raises:
        RuntimeError: (inside) a function that changes the shape of a weight in place, or writes into terms of a sum
            or into a copy of a part of a DTensor that is no parameter; (later) a view is used after the block.
    """
    if _is_inside():
        yield
        return
    # Some init functions do many things with the tensor, which a mode sees one by one and some of which would gather:
    # hence torch.nn.init itself is dressed for the time of the block.
    before = {name: getattr(nn.init, name) for name in _INIT_FUNCTIONS}
    block = _LogicalInit()
    try:
        for name, function in _INIT_FUNCTIONS.items():
            setattr(nn.init, name, _whole(function))
        with block:
            yield
    finally:
        for name, function in before.items():
            setattr(nn.init, name, function)
        block.close()
