"""Kernels that threads call without Python: a call is written down, and anyone can make it.

To start a kernel from Python takes the GIL, and a thread that waits for the GIL sleeps: on a
virtual machine it needs a tenth of a millisecond to wake, as long as many a kernel runs. So the
caller writes the arguments of a call into a *block* of memory, beside the address of code that
makes it, and threads that never sleep long take parts of it from there (`job_rounds.py`).

The first two arguments of such a kernel are the range that it works on. It must not raise: what
Python needs to know is its result, an integer.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.types.containers import StarArgTuple, StarArgUniTuple
from numba.extending import intrinsic

from emberkeep._types import I64
from emberkeep.kernels._jit import variant

_WORD = ir.IntType(64)
_WORDS = _WORD.as_pointer()
_CALL = ir.FunctionType(ir.VoidType(), [_WORDS, _WORD, _WORD, _WORDS])

_STAR_ARGS = (StarArgTuple, StarArgUniTuple)

# What a part that could not get memory leaves as its result.
FAILED = -(2**63)


def _words(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(builder.bitcast(data, _WORDS), [at])


@intrinsic
def write_call(typing_context: Any, function: Any, block: Any, args: Any) -> Any:
    """Writes the call `function(start, stop, *args)` into a block: code first, then arguments.

    Arrays are written as addresses: the caller keeps them until the call was made.
    """
    wanted = (types.int64, types.int64, *args.types)
    signature = function.get_call_type(typing_context, wanted, {})

    def generate(context: Any, builder: Any, outer: Any, values: Any) -> Any:
        given, expected = outer.args[2].types, [*signature.args[2:]]
        if isinstance(expected[-1], _STAR_ARGS):
            expected[-1:] = expected[-1].types
        block_words = _words(context, builder, outer.args[1], values[1], _WORD(0))
        places, at = [], 1
        for i, (kind, target) in enumerate(zip(given, expected, strict=True)):
            value = context.cast(builder, builder.extract_value(values[2], i), kind, target)
            if isinstance(target, types.Array):
                # The owner that Python's array was given for this call ends with it.
                array = context.make_array(target)(context, builder, value)
                array.meminfo = cgutils.get_null_value(array.meminfo.type)
                array.parent = cgutils.get_null_value(array.parent.type)
                value = array._getvalue()
            place = value.type.as_pointer()
            builder.store(
                value, builder.bitcast(builder.gep(block_words, [_WORD(at)]), place), align=8
            )
            places.append((at, place))
            at += -(-context.get_abi_sizeof(value.type) // 8)
        code = _caller(context, builder.module, function, signature, places)
        builder.store(builder.ptrtoint(code, _WORD), block_words)
        return context.get_dummy_value()

    return types.void(function, block, args), generate


def _caller(context: Any, module: Any, function: Any, signature: Any, places: Any) -> Any:
    """Code that reads the arguments from a block, calls the kernel and stores its result."""
    code = ir.Function(module, _CALL, module.get_unique_name("job"))
    code.linkage = "internal"
    builder = ir.IRBuilder(code.append_basic_block())
    block, start, stop, result = code.args
    args = [
        builder.load(builder.bitcast(builder.gep(block, [_WORD(at)]), place), align=8)
        for at, place in places
    ]
    last = signature.args[-1]
    if isinstance(last, _STAR_ARGS):
        own = len(signature.args) - 3
        args[own:] = [context.make_tuple(builder, last, args[own:])]
    compiled = function.dispatcher.overloads[signature.args]
    context.active_code_library.add_linking_library(compiled.library)
    status, value = context.call_internal_no_propagate(
        builder, compiled.fndesc, signature, [start, stop, *args]
    )
    if signature.return_type == types.none:
        value = _WORD(0)
    builder.store(builder.select(status.is_error, _WORD(FAILED), value), result)
    builder.ret_void()
    return code


def _write(block: I64, *args: Any) -> None:
    write_call(function, block, args)  # noqa: F821


def writer(function: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel that writes calls of a kernel into blocks."""
    return variant(_write, f"write_{function.__name__}", of=function, function=function)


@intrinsic
def make_call(
    typing_context: Any, words: Any, block: Any, start: Any, stop: Any, result: Any
) -> Any:
    """Makes the call that was written at `words[block]`; its result goes to `words[result]`."""

    def generate(context: Any, builder: Any, outer: Any, values: Any) -> Any:
        place = _words(context, builder, outer.args[0], values[0], values[1])
        result = _words(context, builder, outer.args[0], values[0], values[4])
        code = builder.inttoptr(builder.load(place), _CALL.as_pointer())
        builder.call(code, [place, values[2], values[3], result])
        return context.get_dummy_value()

    return types.void(words, *[types.int64] * 4), generate


@intrinsic
def fetch_add(typing_context: Any, words: Any, at: Any, value: Any) -> Any:
    """Adds to a word and returns what it was, in one step for all threads."""

    def generate(context: Any, builder: Any, outer: Any, values: Any) -> Any:
        place = _words(context, builder, outer.args[0], values[0], values[1])
        return builder.atomic_rmw("add", place, values[2], "seq_cst")

    return types.int64(words, types.int64, types.int64), generate


@intrinsic
def load(typing_context: Any, words: Any, at: Any) -> Any:
    """A word as it is now, and everything that was written before it."""

    def generate(context: Any, builder: Any, outer: Any, values: Any) -> Any:
        place = _words(context, builder, outer.args[0], values[0], values[1])
        return builder.load_atomic(place, "seq_cst", 8)

    return types.int64(words, types.int64), generate


@intrinsic
def store(typing_context: Any, words: Any, at: Any, value: Any) -> Any:
    """Writes a word after everything that was written before it."""

    def generate(context: Any, builder: Any, outer: Any, values: Any) -> Any:
        place = _words(context, builder, outer.args[0], values[0], values[1])
        builder.store_atomic(values[2], place, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), generate


@intrinsic
def relax(typing_context: Any) -> Any:
    """Tells the processor that this thread waits in a loop, so that its sibling gets more of it."""

    def generate(context: Any, builder: Any, outer: Any, values: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause")
            builder.call(hint, [])
        elif platform.machine() in ("aarch64", "arm64"):
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(hint, [ir.IntType(32)(1)])
        return context.get_dummy_value()

    return types.void(), generate
