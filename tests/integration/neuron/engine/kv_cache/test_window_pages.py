"""KV pages before the sliding window of a sequence are released, and other sequences use them.

If only some layers have a window, the window pages are released, and the KV pages stay.
"""

from simulated_cache import SimulatedCache

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.window_page_pool import WindowPages, window_pages_needed

PAGE, WINDOW = 4, 10


class Simulation:
    """A scheduler of a model with a sliding window, with a simulated cache that checks each read.

    Args:
        window_pages: number of window pages; 0 if all layers have a window.
    """

    def __init__(self, pages: int, window_pages: int = 0, **options: object) -> None:
        settings = EngineOptions(**{"speculation": False, "max_step_tokens": 8} | options)  # type: ignore[arg-type]
        self.windows = WindowPages(window_pages, pages, PAGE, WINDOW) if window_pages else None
        self.scheduler = Scheduler(settings, PagePool(pages, PAGE, self.windows), window=WINDOW)
        self.cache = SimulatedCache(self.scheduler)
        self.count = 0

    def add(self, prompt: list[int], max_tokens: int = 2) -> Sequence:
        self.count += 1
        sequence = Sequence(
            Generate(id=self.count, prompt=prompt, max_tokens=max_tokens, sampling=SamplingParams(temperature=0))
        )
        assert self.scheduler.add(sequence) is None
        return sequence

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.scheduler.commit(plan, self.cache.run(plan))
        self.scheduler.check_idle()

    def finish(self) -> None:
        while not self.scheduler.idle:
            self.step()

    @property
    def held(self) -> int:
        return self.scheduler.pages.total - self.scheduler.pages.free


def test_sequence_of_a_sliding_window_model_holds_only_the_pages_of_its_window() -> None:
    simulation = Simulation(pages=40)
    sequence = simulation.add(list(range(100)), max_tokens=30)
    while sequence.computed < 125:
        simulation.step()
        first = max(sequence.computed - WINDOW + 1, 0) // PAGE
        assert simulation.held == -(-sequence.computed // PAGE) - first
    assert simulation.held <= 4
    simulation.finish()


def test_concurrent_sequences_reuse_pages_that_left_the_window_without_preemption() -> None:
    """The sequences fill more than 33 pages together; the pool has 24."""
    simulation = Simulation(pages=24, prefix_reuse="off")
    sequences: list[Sequence] = []
    for start in (0, 100, 200):
        sequences.append(simulation.add(list(range(start, start + 40)), max_tokens=60))
        while sequences[-1].computed < 40:
            simulation.step()
    assert all(sequence.computed >= 40 for sequence in sequences), "a sequence was preempted"
    simulation.finish()


def test_prompt_reuses_cached_pages_that_left_the_window_of_an_equal_prefix() -> None:
    simulation = Simulation(pages=40)
    simulation.add(list(range(60)))
    simulation.finish()
    again = simulation.add([*range(60), 7, 8, 9])
    simulation.finish()
    assert again.cached == 60 // PAGE * PAGE


def test_all_pages_of_a_failed_sequence_are_cleared_even_those_before_the_window() -> None:
    simulation = Simulation(pages=40)
    sequence = simulation.add(list(range(60)), max_tokens=8)
    while sequence.computed < 60:
        simulation.step()
    assert sequence.unseen
    cleared = simulation.scheduler.queues.memory.discard(sequence)
    assert len(cleared) == len(set(cleared)) == 15, "all pages of the sequence are cleared"
    assert simulation.held == 0
    assert not simulation.scheduler.pages.match(sequence.chain[1:])


def test_sequence_of_a_model_with_full_and_window_layers_holds_only_its_windows_pages() -> None:
    simulation = Simulation(pages=40, window_pages=8)
    sequence = simulation.add(list(range(100)), max_tokens=30)
    windows = simulation.windows
    assert windows is not None
    while sequence.computed < 125:
        simulation.step()
        pages, first = -(-sequence.computed // PAGE), max(sequence.computed - WINDOW + 1, 0) // PAGE
        assert simulation.held == pages
        assert windows.total - windows.free == pages - first
    simulation.finish()
    assert windows.free == windows.total


def test_prompt_reuses_a_prefix_only_up_to_where_its_window_pages_are_cached() -> None:
    """The window pages of the long prompt's end are cached; the pages before them were given to other KV pages."""
    simulation = Simulation(pages=100, window_pages=8)
    simulation.add(list(range(60)))
    simulation.finish()
    longer = simulation.add([*range(60), 7, 8, 9])
    simulation.finish()
    shorter = simulation.add([*range(30), 7, 8, 9])
    simulation.finish()
    assert (longer.cached, shorter.cached) == (60, 0)


def test_window_pages_that_a_prompt_recomputed_are_reused_by_later_prompts() -> None:
    """The KV pages of the prefix stay registered, so the pages of the second prompt must replace them."""
    simulation = Simulation(pages=100, window_pages=8)
    for prompt in (range(60), range(30), range(30)):
        latest = simulation.add([*prompt, 7, 8, 9])
        simulation.finish()
    assert latest.cached == 32


def test_computed_number_of_window_pages_lets_all_sequences_run_without_preemption() -> None:
    needed = window_pages_needed(WINDOW, PAGE, sequences=3, step_tokens=64, drafts=0)
    simulation = Simulation(pages=200, window_pages=needed, max_sequences=3, max_step_tokens=64)
    for start in (0, 100, 200, 300):
        simulation.add(list(range(start, start + 90)), max_tokens=40)
    sequences = [*simulation.scheduler.waiting]
    simulation.finish()
    assert all(sequence.generated == 40 for sequence in sequences)
    assert simulation.scheduler.queues.cached_tokens == 0, "a sequence was preempted, and found its pages again"


def test_kv_pages_and_window_pages_of_a_failed_sequence_are_cleared() -> None:
    simulation = Simulation(pages=40, window_pages=8)
    sequence = simulation.add(list(range(60)), max_tokens=8)
    while sequence.computed < 60:
        simulation.step()
    cleared = simulation.scheduler.queues.memory.discard(sequence)
    assert len([part for part in cleared if part < 40]) == 15
    assert len([part for part in cleared if part >= 40]) == 8, (
        "released window pages keep numbers until they are reused"
    )
    assert len(cleared) == len(set(cleared))
    assert not simulation.scheduler.pages.match(sequence.chain[1:])
    simulation.scheduler.check_idle()
