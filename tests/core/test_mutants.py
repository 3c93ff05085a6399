"""Every fault in `tests/mutants.py` matches exactly one line of the code. `python -m tests.mutants`
tries each fault.
"""

from __future__ import annotations

import pytest

from tests.mutants import FAULTS, ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_line_of_each_fault_is_in_the_code_once(fault):
    code = (ROOT / "gpu_runtime" / f"{fault.module}.py").read_text()
    assert code.count(fault.line) == 1
    # Otherwise the tests would fail without a look at the fault.
    compile(code.replace(fault.line, fault.wrong), fault.name, "exec")
    assert all((ROOT / test.split("::")[0]).exists() for test in fault.tests)
