"""Real processes that use equal models one after the other: their uses add up."""

import pytest

from gpu_runtime.facts import decode_uses
from tests.clock import PATIENCE, until

from .kernels import Kernel

# A fake model has no source. With this evidence, all fake models have equal sources.
EQUAL = (
    "from gpu_runtime.backends.fake import FakeBackend; from gpu_runtime.facts import Evidence; "
    "FakeBackend.evidence = lambda self, spec, origin=None: Evidence(fingerprint='f' * 64)"
)
CLOCK = "wall = [{at}]; rt._session.wall = lambda: wall[0] + 0.5"
REGISTER = "rt.register({name!r}, backend='fake', size='3GiB')"
USE = 'wall[0] = {at}; exec("with rt.use({name!r}): pass"); rt.tick()'
ENDS = ("rt.close()", "rt.forget('qwen')", "rt.evict('qwen', drop=True)")


def uses(kernel: Kernel, name: str, now: int) -> tuple[int, ...]:
    """The times of the model's uses that this process publishes."""
    seen = kernel.run(f"print(rt._session.residents[{name!r}].truth().recent_uses, flush=True)")
    assert kernel.answer() == "done"
    return decode_uses(seen, now)


def start(kernel, name: str, at: int) -> Kernel:
    made = kernel()
    made.do(EQUAL, CLOCK.format(at=at), REGISTER.format(name=name))
    return made


def use(kernel: Kernel, name: str, *times: int) -> None:
    kernel.do(*(USE.format(name=name, at=at) for at in times))


@pytest.mark.parametrize("end", ENDS)
def test_uses_outlive_the_process_that_releases_the_model(kernel, end):
    earlier = start(kernel, "qwen", 1000)
    use(earlier, "qwen", 1000, 1100, 1200)
    assert uses(earlier, "qwen", 1200) == (1000, 1100, 1200)
    earlier.do(end)
    later = start(kernel, "another-name", 1300)
    use(later, "another-name", 1300)
    assert uses(later, "another-name", 1300) == (1000, 1100, 1200, 1300)


def test_uses_outlive_the_ordinary_end_of_a_process(kernel):
    """The third process reads the uses of both others, which have ended one after the other."""
    for name, at in (("qwen", 1000), ("writer", 1100)):
        one = start(kernel, name, at)
        use(one, name, at, at + 10)
        one.process.stdin.close()
        assert one.process.wait(PATIENCE) == 0
    later = start(kernel, "qwen", 1200)
    use(later, "qwen", 1200)
    assert uses(later, "qwen", 1200) == (1000, 1010, 1100, 1110, 1200)


@pytest.mark.parametrize("loaded_before", [True, False])
def test_uses_outlive_a_killed_process(kernel, loaded_before):
    """The process that removes the dead owner writes the event; one that has the model reads it in the book."""
    later = start(kernel, "qwen", 1300)
    if loaded_before:
        use(later, "qwen", 1300)
    killed = start(kernel, "qwen", 1000)
    use(killed, "qwen", 1000, 1100)
    killed.end()
    if not loaded_before:
        use(later, "qwen", 1300)

    def are_added_up() -> bool:
        later.do("rt.tick()")
        return uses(later, "qwen", 1300) == (1000, 1100, 1300)

    until(are_added_up)
