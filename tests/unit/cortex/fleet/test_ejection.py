"""Ejection of nodes whose error responses other nodes would not give, with a scripted clock."""

from hypothesis import given
from hypothesis import strategies as st

from helexa.cortex.fleet.breaker import ANY
from helexa.cortex.fleet.ejection import FIRST_EJECTION_SECS, MAX_EJECTIONS, MAX_STRIKES, Ejection, Ejections, Requester

PAIR = ("n1", "M")
ANN, BOB = Requester("ann", "/chat"), Requester("bob", "/chat")
ALL = (PAIR, Requester(ANY, "/chat"))
LONGEST = FIRST_EJECTION_SECS * 2 ** (MAX_STRIKES - 1)


def test_first_bad_response_ejects_node_and_model_only_for_its_client_and_path() -> None:
    ejections = Ejections()
    assert not ejections.struck(PAIR, ANN, 0.0)
    assert ejections.ejected(0.0) == {(PAIR, ANN)}
    assert ejections.changes_at(0.0) == FIRST_EJECTION_SECS
    assert ejections.ejected(FIRST_EJECTION_SECS) == frozenset()


def test_bad_responses_to_two_clients_eject_node_and_model_for_all_clients() -> None:
    ejections = Ejections()
    ejections.struck(PAIR, ANN, 0.0)
    assert ejections.struck(PAIR, BOB, 0.0)
    assert ALL in ejections.ejected(0.0)


def test_good_response_to_another_client_prevents_an_ejection_for_all() -> None:
    ejections = Ejections()
    for now in range(100):
        ejections.struck(PAIR, ANN, float(now))
        assert ejections.served(PAIR, BOB)
        assert ALL not in ejections.ejected(float(now))
    assert (PAIR, ANN) in ejections.ejected(99.0)


def test_ejected_node_gets_one_trial_request_at_a_time() -> None:
    ejections = Ejections()
    ejections.struck(PAIR, ANN, 0.0)
    assert ejections.began(PAIR, ANN, 0.5) == ()  # ejected: forced, because no other node can serve
    trial = ejections.began(PAIR, ANN, 1.0)
    assert trial == ((PAIR, ANN),)
    assert ejections.ejected(1.0) == {(PAIR, ANN)} and ejections.began(PAIR, ANN, 1.0) == ()
    ejections.ended(trial)
    assert not ejections.ejected(1.0)  # the trial had no result: another one is allowed


def test_failed_trial_doubles_the_ejection_time_and_a_successful_trial_ends_it() -> None:
    ejections, now = Ejections(), 0.0
    for expected in (1, 2, 4, 8, 16, 32, 32):
        trial = ejections.began(PAIR, ANN, now)
        ejections.struck(PAIR, ANN, now)
        ejections.struck(PAIR, ANN, now)  # a request that had begun before
        ejections.ended(trial)
        assert ejections.changes_at(now) == now + expected * FIRST_EJECTION_SECS
        now = ejections.changes_at(now)
    for _ in range(MAX_STRIKES):
        assert ejections.began(PAIR, ANN, now)
        assert ejections.served(PAIR, ANN)
    assert not ejections.began(PAIR, ANN, now) and not ejections.served(PAIR, ANN)


def test_third_rejection_in_a_row_on_one_path_makes_a_node_suspect_until_a_good_response() -> None:
    ejections = Ejections()
    assert [ejections.rejected(PAIR, "/chat") for _ in range(4)] == [False, False, True, True]
    assert not ejections.rejected(PAIR, "/else")
    ejections.served(PAIR, BOB)
    assert not ejections.rejected(PAIR, "/chat")
    ejections.keep(lambda _: False)
    assert not ejections


def test_number_of_stored_ejections_stays_below_a_maximum() -> None:
    ejections = Ejections()
    for client in ("ann", "bob"):
        ejections.struck(("other node", "M"), Requester(client, "/chat"), 0.0)
    for number in range(2 * MAX_EJECTIONS):
        ejections.struck(PAIR, Requester(f"client {number}", "/chat"), 0.0)
    assert len(ejections.ejected(0.0)) == MAX_EJECTIONS
    assert (("other node", "M"), Requester(ANY, "/chat")) in ejections.ejected(0.0)


moves = st.lists(st.tuples(st.sampled_from(["began", "ended", "struck", "served", "wait"]), st.floats(0, 40)))


@given(moves)
def test_ejection_allows_one_trial_at_a_time_and_ends_after_random_events(events: list[tuple[str, float]]) -> None:
    ejection, now, trials = Ejection(), 0.0, 0
    for move, secs in events:
        if move == "wait":
            now += secs
        elif move == "began":
            begun = ejection.began(now)
            trials += begun is not ejection
            ejection = begun
        elif move == "ended":
            ejection, trials = Ejection(ejection.strikes, ejection.accuser, ejection.until), 0
        elif move == "struck":
            ejection = ejection.struck("ann", now)
            trials = trials if ejection.trying else 0
        elif move == "served":
            ejection, trials = ejection.served(), 0
        assert trials <= 1
    assert not Ejection(ejection.strikes, ejection.accuser, ejection.until).ejected(now + LONGEST)
