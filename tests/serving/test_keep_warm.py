"""A model stays warm for the longest time that its calls set, and as long as a call holds the model."""

from gpu_runtime.serving.queue import RETRY_SECONDS, KeepWarm
from tests.serving.harness import Clock
from tests.serving.loops import settle


class Card:
    def __init__(self) -> None:
        self.clock, self.held, self.evicted = Clock(), set(), []
        self.keep_warm = KeepWarm(self.clock, self.evict)

    async def evict(self, model: str) -> bool:
        if model in self.held:
            return False
        self.evicted.append(model)
        return True

    async def later(self, seconds: float) -> list[str]:
        self.clock.now += seconds
        self.keep_warm.evict_due()
        await settle()
        return self.evicted


async def test_a_later_wish_replaces_an_earlier_one_and_a_default_does_not_shorten_it():
    """`keep_alive: 0` with a message unloads the model, though an earlier call set an hour."""
    card = Card()
    card.keep_warm.keep("a", 3600.0, wished=True)
    card.keep_warm.keep("a", 100.0)
    assert card.keep_warm.until("a") == card.clock() + 3600.0
    card.keep_warm.keep("a", 10.0, wished=True)
    assert await card.later(9.0) == []
    assert await card.later(1.0) == ["a"]
    card.keep_warm.keep("a", 300.0)
    card.keep_warm.keep("a", 0.0, wished=True)
    assert await card.later(0.0) == ["a", "a"]
    await card.keep_warm.close()


async def test_a_model_in_use_at_the_end_of_its_time_is_tried_again():
    """A notebook in the same process may use the model, so its eviction is refused and tried again later."""
    card = Card()
    card.held.add("a")
    card.keep_warm.keep("a", 10.0)
    assert await card.later(10.0) == []
    card.held.clear()
    assert await card.later(RETRY_SECONDS - 1) == []
    assert await card.later(1.0) == ["a"]
    await card.keep_warm.close()


async def test_a_call_that_ends_while_the_eviction_is_tried_sets_the_time():
    card = Card()

    async def refused(model: str) -> bool:
        card.keep_warm.keep(model, 3600.0, wished=True)
        return False

    card.keep_warm._evict = refused
    card.keep_warm.keep("a", 10.0)
    await card.later(10.0)
    assert card.keep_warm.until("a") == card.clock() + 3600.0
    await card.keep_warm.close()


async def test_a_model_that_is_loaded_again_as_its_eviction_ends_stays_warm():
    """The eviction is done in a thread. Until the event loop knew, a new load was evicted at once."""
    card = Card()
    evict = card.keep_warm._evict

    async def then_loaded(model: str) -> bool:
        done = await evict(model)
        card.keep_warm.keep(model, 300.0)
        return done

    card.keep_warm._evict = then_loaded
    card.keep_warm.evict_soon("a")
    assert await card.later(0.0) == ["a"]
    assert await card.later(299.0) == ["a"]
    card.held.add("a")
    card.keep_warm.evict_soon("a")
    await card.later(0.0)
    card.held.clear()
    assert await card.later(RETRY_SECONDS) == ["a", "a"], "tried again soon, not after 300 s"
    await card.keep_warm.close()


async def test_a_model_to_evict_soon_is_evicted_at_the_end_of_its_calls():
    """The keep-warm times of the calls make no difference, because the model must be loaded again."""
    card = Card()
    card.held.add("a")
    card.keep_warm.keep("a", 1000.0)
    card.keep_warm.evict_soon("a")
    assert await card.later(0.0) == []
    card.held.clear()
    card.keep_warm.keep("a", 1000.0)  # the end of a call that ran in the meantime
    assert await card.later(0.0) == ["a"]
    card.keep_warm.keep("a", 1000.0)
    assert await card.later(999.0) == ["a"], "anew, it stays as long as any"
    await card.keep_warm.close()
