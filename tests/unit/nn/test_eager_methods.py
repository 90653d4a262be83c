"""What `torch.compile` leaves alone, without loading it."""

from __future__ import annotations

import subprocess
import sys

import torch

from emberkeep.nn.eager_methods import eager


def test_importing_the_modules_does_not_load_the_compiler() -> None:
    code = "import sys, emberkeep.keeper; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_method_is_not_traced() -> None:
    """Its body runs each time, with what it does beside tensors."""
    seen = []

    class Module(torch.nn.Module):
        @eager
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.compiler.is_compiling())
            return x + len(seen)

    made = torch.compile(torch.nn.Sequential(Module(), torch.nn.Identity()), backend="eager")
    zero = torch.zeros(1)
    assert [float(made(zero)) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert seen == [False] * 3
