"""Each sentence of the page on security has tests that show it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
# What people can do and cannot do, as the page says it, each with its tests.
SHOWN_BY = """
take ports, or the port of an engine that ended. The engine gets the next port; the process in its place is
sent nothing, and no key
    test_a_process_of_any_user_on_the_port_is_sent_nothing
    test_a_call_to_an_engine_whose_port_was_taken_is_not_sent
take all ports of `GPU_ENGINE_PORTS`. Engines then do not start; the error names the setting
    test_ports_taken_by_another_user_end_in_one_clear_error
make the fallback directory `/var/tmp/gpu-console-UID` first. The ledger is then refused, with the setting to
use
    test_a_fallback_directory_that_another_user_made_first_is_refused
take the abstract socket address that is the lock of a keeper, while the keeper does not run. The ledger then
cannot be opened; `keeper.log` says so
    test_a_taken_lock_lets_no_keeper_begin
use memory of a card without a lease. The memory is measured, and its processes are named
    test_unleased_memory_names_its_processes
pose as an engine, before it listens or after it ended
    test_the_address_of_an_engine_whose_port_was_taken_is_not_given
    test_no_health_check_carries_the_key
use an engine with a key, or hold the claims of its ports
    test_requests_without_the_key_are_rejected
    test_no_other_user_can_hold_a_claim
listen on a port that an engine will inherit
    test_no_process_can_listen_on_a_port_that_an_engine_will_inherit
replace a private ledger, or put a link or a directory in its way
    test_a_named_ledger_below_another_users_directory_is_refused
    test_the_fallback_directory_is_this_users_alone
open a shared ledger without its group
    test_a_user_outside_the_group_gets_a_clear_error
replace the socket of a console, or use a socket that is open to them
    test_a_directory_that_others_could_replace_is_refused
    test_another_user_needs_the_token_even_if_the_socket_is_open_to_them
read the token in a log, on a command line or in a file
    test_tokens_are_in_no_log_and_on_no_command_line
    test_only_a_terminal_gets_the_url_with_the_token
have another user's idle model evicted, and an idle notebook parked: both return when they are used
    test_another_user_may_request_an_eviction_and_nothing_else
read, replace or remove what a notebook has parked on a disk: the file has no name, and its directory is
one that only the user and root can replace
    test_a_directory_that_another_user_can_replace_is_refused
    test_a_removed_directory_is_an_error_and_one_removed_later_is_not
remove the keeper's socket, or send it anything. It makes the socket again; the book is in memory that only
the keeper writes
    test_a_crowd_outlives_attacks_on_its_keeper
replace files of the ledger by links. Their targets are not changed, also not in a race
    test_links_of_a_member_are_not_followed
read names of models, users and notebooks, and maps of memory
    test_members_see_each_others_maps
act in another user's name
    test_a_request_in_another_users_name_does_not_reach_the_book
keep the book in the keeper's place
    test_a_member_starts_no_keeper_and_trusts_none_of_another_member
park another user's process by `--checkpoint`, or bring it back, unless they are an operator, and the driver
too allows that user to act on it
    test_another_users_process_is_parked_by_an_operator_only
choose the room that a parked process gets at its return
    test_a_note_that_others_could_replace_is_not_used
pin, load or defragment in another user's process, unless an operator
    test_the_owner_refuses_what_the_caller_should_have_refused
    test_operators_may_request_everything
run code in another process: a name in the book only selects a registered model
    test_a_name_in_the_book_only_selects_a_registered_model
be granted more than the caps by several unchanged processes
    test_a_cap_on_bytes_counts_all_processes_of_a_user
change another user's journal, or take its place before it is made
    test_no_member_can_change_another_users_journal
    test_a_journal_in_a_place_that_another_user_took_is_not_written
stop a reader by a journal that is a pipe, a link or a query without end
    test_a_file_that_another_user_made_a_journal_is_not_read
end the leases of another user's process, unless an operator and the process is lost
    test_another_users_process_may_be_ended_by_an_operator_only
    test_a_process_that_is_proven_alive_cannot_be_ended
control a terminal by a name, a path or a reason
    test_no_text_face_can_control_the_terminal
put a script into a page by a name
    test_names_are_escaped_wherever_they_are_shown
see a form for the token, and nothing else
    test_a_token_can_be_typed_into_the_form
    test_a_program_without_the_token_gets_json
send wrong tokens. Only the answers to these are delayed
    test_each_stranger_waits_for_its_own_guesses_and_the_right_token_never
try passwords of Panel's login, one a second after the first ones. Each user of the machine, and each address,
has a limit of its own
    test_passwords_are_slowed
    test_each_stranger_has_a_limit_of_its_own_and_the_last_ones_are_remembered
reach a route, a file or a websocket. Only a program on this machine may ask `/livez` and `/readyz`
    test_no_route_answers_without_a_token
    test_no_websocket_opens_without_the_token
keep out the holder of a token by wrong tokens
    test_the_right_token_is_admitted_during_a_flood_of_wrong_ones
keep others out by open connections: a stranger may have 256, and a request's head has 20 s
    test_half_open_connections_of_another_user_keep_nobody_out
    test_a_head_that_does_not_come_closes_the_connection
use up the server's files or processor time with connections
    test_without_files_nothing_is_accepted_for_a_while
    test_the_limit_on_files_is_raised_as_far_as_allowed
fill the disk with log lines
    test_a_flood_of_lines_is_left_out_of_the_log_and_counted
act through a page of theirs in your browser
    test_a_page_of_another_origin_is_answered_only_if_the_operator_named_it
choose the session that you will use
    test_the_gate_admits_whom_the_token_in_its_place_proves
forge a login, or act under a name without a role
    test_a_forged_login_is_no_login
    test_an_account_without_a_role_is_refused
with the operator's token, do everything that the page and the routes offer
    test_every_route_answers_with_the_token_and_refuses_without_it
with the viewer's token, look
    test_every_route_asks_for_the_token_and_a_viewer_only_reads
act with the viewer's token, also not by a forged click
    test_a_viewers_forged_click_does_nothing
    test_a_viewer_has_no_buttons_and_no_dialog_and_a_forged_click_does_nothing
join the session of an operator as a viewer
    test_a_page_joins_no_session_of_another_visitor
    test_a_websocket_is_joined_only_by_its_visitor_and_a_closed_gate_admits_nobody
act where the server is read-only
    test_read_only_makes_every_visitor_a_viewer
use the token of an earlier start
    test_each_start_makes_a_new_token
keep a model busy with a huge prompt
    test_a_value_at_its_limit_is_accepted_and_one_beyond_is_refused
    test_a_long_prompt_that_cannot_fit_takes_no_turn_of_a_model_whose_tokenizer_is_known
send a body without limit
    test_a_body_that_is_too_large_is_refused_with_its_size
see and act on the own notebooks and models
    test_a_member_acts_on_the_own_notebook
see how much each other user holds and waits for
    test_a_member_sees_the_sum_of_each_user_and_the_totals_of_the_devices
see the name of another user's notebook, model or process
    test_no_name_of_another_user_is_on_the_page_of_a_member
see the hours of another user, unless `GPU_CONSOLE_HOURS` is `all`
    test_a_member_sees_the_own_hours_and_those_of_others_as_sums_if_the_operator_allows_it
act on another user's process or on a card, also not by a forged click
    test_no_verb_of_a_member_reaches_another_users_process
    test_a_forged_click_of_a_member_opens_no_dialog
come in without the hub's login, or by a script of a notebook
    test_nobody_gets_in_without_the_hub
keep the page of an earlier role
    test_a_group_of_the_setting_makes_operators
use memory of a card without a lease. The monitor reports it
    test_memory_of_strangers_is_measured_and_named
take a port before an engine does. The engine gets the next one
    test_a_process_of_any_user_on_the_port_is_sent_nothing
evict a model that is in use in another process
    test_a_model_in_use_in_another_kernel_is_waited_for
keep its memory when it is killed
    test_a_killed_kernel_leaves_nothing_behind
make a living process look dead by stopping it
    test_a_stopped_kernel_is_not_dead
run code from a model's directory, unless the setting and the file both allow it
    test_code_of_a_models_directory_never_runs_unasked_and_nobody_is_asked
    test_trust_needs_both_the_file_and_the_setting
load pickled weights
    test_a_source_without_safe_weights_is_refused_with_what_it_needs
set up a shared ledger; nobody else can
    test_init_requires_root
open a private ledger below another user's directory
    test_a_named_ledger_below_another_users_directory_is_refused
be led elsewhere by a member's link while it sets up a ledger
    test_init_follows_no_link_of_a_member
"""


def existing_tests() -> set[str]:
    """The names of all test functions below `tests/`."""
    files = (ROOT / "tests").rglob("test_*.py")
    function = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.M)
    return {name for path in files for name in function.findall(path.read_text())}


def claims(page: str) -> list[str]:
    """The sentences of the lists, each in one line."""
    section = page.partition("## Who can do what\n")[2].partition("\n## ")[0]
    found = re.findall(r"^- (.+(?:\n  .+)*)", section, re.M)
    return [" ".join(claim.split()) for claim in found]


def with_tests(text: str) -> dict[str, list[str]]:
    """The sentences of `text` with the names of their tests, which are indented."""
    found = re.findall(r"((?:^\S.*\n)+)((?:^ +test_\w+\n)*)", text, re.M)
    return {" ".join(claim.split()): tests.split() for claim, tests in found}


def test_each_kind_of_person_has_a_list_of_what_they_can_and_cannot_do():
    section = PAGE.partition("## Who can do what\n")[2].partition("\n## ")[0]
    people = re.findall(r"^### (.*)$", section, re.M)
    assert len(people) >= 7
    for person in people:
        words = section.partition(f"### {person}\n")[2].partition("\n### ")[0]
        assert "They can:" in words and "They cannot:" in words, person


def test_each_sentence_has_tests_that_exist():
    shown_by, known = with_tests(SHOWN_BY), existing_tests()
    assert sorted(claims(PAGE)) == sorted(shown_by)
    missing = {claim: tests for claim, tests in shown_by.items() if set(tests) - known}
    assert missing == {} and all(shown_by.values())


def test_a_new_sentence_is_noticed():
    page = "## Who can do what\n### Ann\nThey can:\n\n- fly\n  far\n\n## More\n- no claim\n"
    assert claims(page) == ["fly far"]
    assert with_tests("fly\nfar\n    test_of_flying\nread\n") == {
        "fly far": ["test_of_flying"],
        "read": [],
    }
