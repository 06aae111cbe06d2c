"""Doors opened again, one at a time: a test of tests/security has to notice."""

from __future__ import annotations

from mutants.model import Mutant

GRANTS = "sql/code/9_installing/grants.sql"
FILES = "plpython/ulak/safety/files.py"
KAFKA = "tests/worker/test_kafka.py"
NATS = "plpython/ulak/transports/nats/connection.py"
SECRECY = "plpython/ulak/transports/http/secrecy.py"
WORKER = "sql/code/7_running/worker.sql"
ADMIN = "tests/security/test_admin.py"
APPLICATION = "tests/security/test_application.py"
TABLE_OWNER = "tests/security/test_table_owner.py"
MONITOR = "tests/security/test_monitor.py"
NETWORK = "tests/security/test_network.py"
OTHERS = "tests/security/test_other_applications.py"
NOBODY = "tests/security/test_nobody.py"
PULL_WORKER = "tests/security/test_pull_worker.py"
RECEIVER = "tests/security/test_receiver.py"
BOUND = "tests/db/test_bound_secrets.py"
ECHO = f"{RECEIVER}::test_what_a_receiver_echoes_of_secrets_and_payload_reaches_no_monitor"
FILE = f"{ADMIN}::test_every_problem_with_a_file_looks_the_same_and_delays_no_delivery"

MUTANTS = [
    # Nobody.
    Mutant(
        "poller: an advisory lock decides",
        WORKER,
        "return not exists (select from ulak.workers w where w.slot < p_slot and ulak_private.is_taken(w))",
        "return pg_try_advisory_xact_lock(hashtext('ulak_poller'), 0)",
        (f"{NOBODY}::test_advisory_locks_hold_up_no_worker",),
    ),
    Mutant(
        "watcher: by its name alone",
        "sql/code/7_running/watcher.sql",
        "and a.usename = 'ulak_worker' and a.application_name = 'ulak watcher'",
        "and a.application_name = 'ulak watcher'",
        (f"{NOBODY}::test_a_session_that_calls_itself_a_worker_or_a_watcher_is_neither",),
    ),
    Mutant(
        "tables: everybody may lock them",
        GRANTS,
        "-- Tables and views.",
        "grant usage on schema ulak to public; grant select, update on ulak.queue, ulak_private.locks to public;\n-- Tables and views.",
        (f"{NOBODY}::test_tables_can_not_be_locked_by_nobody",),
    ),
    # A monitor.
    Mutant(
        "monitor: may do what an administrator may",
        GRANTS,
        "'dlq_summary', 'message_status', 'find_messages', 'find_letters', 'retry_delay', 'setting', 'help',\n",
        "'dlq_summary', 'message_status', 'find_messages', 'find_letters', 'retry_delay', 'setting', 'help', 'claim',\n",
        (f"{MONITOR}::test_it_grants_claims_and_dates_nothing",),
    ),
    Mutant(
        "monitor: reads configs",
        GRANTS,
        "grant select on ulak.maintenance_status to ulak_worker;",
        "grant select on ulak.endpoint_grants to ulak_monitor;",
        (f"{MONITOR}::test_it_grants_claims_and_dates_nothing",),
    ),
    Mutant(
        "monitor: advice that leads elsewhere",
        "sql/code/8_looking/doctor_signatures.sql",
        "''^http:'', ''https:''",
        "''^http:'', ''ftp:''",
        (f"{MONITOR}::test_doctors_advice_on_a_url_is_still_one_to_follow",),
    ),
    # A pull worker.
    Mutant(
        "grants: of a role that isn't there",
        "sql/code/2_endpoints/endpoint_grants.sql",
        "if not exists (select from pg_roles as r where r.rolname = p_role) then",
        "if false then",
        (f"{PULL_WORKER}::test_only_what_exists_can_be_granted",),
    ),
    Mutant(
        "grants: not logged",
        "sql/code/2_endpoints/endpoint_grants.sql",
        "values ('endpoint.granted', v_id, p_name, jsonb_build_object('role', p_role, 'right', p_right));",
        "select 'x', 1, 'x', '{}'::jsonb where false;",
        (f"{PULL_WORKER}::test_grants_are_logged_and_end_with_the_endpoint",),
    ),
    Mutant(
        "grants: a dropped role breaks the look",
        "sql/code/2_endpoints/endpoint_grants.sql",
        "join pg_roles r on r.rolname = g.role_name\n            where g.may_work and pg_has_role(ulak_private.caller(), r.oid, 'usage')",
        "where g.may_work and pg_has_role(ulak_private.caller(), g.role_name::name, 'usage')",
        (f"{PULL_WORKER}::test_the_grant_of_a_dropped_role_does_no_harm",),
    ),
    # Two applications in one database.
    Mutant(
        "send: restricted endpoints are open",
        "sql/code/3_sending/send.sql",
        " and (not e.is_restricted or ulak_private.may_send(e.id))",
        "",
        (OTHERS, "-k", "cannot_send"),
    ),
    Mutant(
        "send with options: restricted endpoints are open",
        "sql/code/3_sending/send.sql",
        "e.is_restricted and not ulak_private.may_send(e.id) as is_refused,",
        "false as is_refused,",
        (OTHERS, "-k", "cannot_send"),
    ),
    Mutant(
        "batches: restricted endpoints are open",
        "sql/code/2_endpoints/endpoint_grants.sql",
        "select e.id, e.is_restricted and not ulak_private.may_send(e.id) into v_id, v_is_refused",
        "select e.id, false into v_id, v_is_refused",
        (OTHERS, "-k", "cannot_send"),
    ),
    Mutant(
        "cancel: messages of restricted endpoints",
        "sql/code/3_sending/cancel.sql",
        "perform ulak_private.require_sender(q.id, q.endpoint_id) from ulak_private.deliveries q where q.id = p_id;",
        "",
        (OTHERS, "-k", "cannot_change"),
    ),
    Mutant(
        "explain: messages of restricted endpoints",
        "sql/code/8_looking/explain.sql",
        "perform ulak_private.require_sender(p_id, v_message.endpoint_id, p_is_look => true);",
        "",
        (OTHERS, "-k", "cannot_change"),
    ),
    Mutant(
        "find_messages: those of restricted endpoints",
        "sql/code/3_sending/find_messages.sql",
        "m.endpoint_id <> all (v_hidden_ids)",
        "true",
        (OTHERS, "-k", "cannot_find_what"),
    ),
    Mutant(
        "publish: to restricted endpoints",
        "sql/code/3_sending/publish.sql",
        "v_mailing := ulak_private.without_closed_endpoints(v_mailing);",
        "null;",
        (OTHERS, "-k", "reaches_the_endpoints"),
    ),
    Mutant(
        "metadata: the type of an event that another publishes",
        "sql/code/3_sending/check_message.sql",
        "where t.name = p_metadata ->> 'event_type' and t.is_restricted",
        "where false and t.is_restricted",
        (OTHERS, "-k", "cannot_publish"),
    ),
    Mutant(
        "idempotency keys: answers to anybody",
        "sql/code/3_sending/replace.sql",
        "if p_sent_by <> ulak_private.caller() and",
        "if false and",
        (OTHERS, "-k", "find_out_a_payload"),
    ),
    Mutant(
        "watch: a temporary relation in place of the changed rows",
        "sql/code/3_sending/watch.sql",
        "if to_regclass('pg_temp.ulak_old_rows') is not null or to_regclass('pg_temp.ulak_new_rows') is not null then",
        "if false then",
        (f"{TABLE_OWNER}::test_a_trigger_that_is_replaced_while_its_statement_runs_reads_no_relation_of_the_session",),
    ),
    Mutant(
        "watch: a trigger that somebody else made",
        "sql/code/3_sending/watch.sql",
        'then tg_argv[0]::bigint end\n        and ulak_private.is_trigger_of(w, tg_relid, tg_name, lower(tg_op collate "C"))',
        "then tg_argv[0]::bigint end",
        (f"{TABLE_OWNER}::test_a_trigger_of_another_table_publishes_nothing_for_a_watch",),
    ),
    Mutant(
        "watch: rows that row security hides",
        "sql/code/3_sending/watch.sql",
        "if row_security_active(p_table) or ulak_private.row_security_applies(p_table, ulak_private.caller()) then",
        "if false then",
        (f"{TABLE_OWNER}::test_a_table_whose_rows_are_hidden_from_an_administrator_is_not_watched_by_it",),
    ),
    Mutant(
        "watch: casts of others run with the rights of ulak",
        "sql/code/3_sending/watch.sql",
        "else 'case when r.%1$I is not null then concat(r.%1$I) end'",
        "else 'r.%1$I'",
        ("tests/security/test_table_owner.py", "-k", "cast"),
    ),
    Mutant(
        "watch: columns that its creator may not read",
        "sql/code/3_sending/watch.sql",
        "and not (has_column_privilege(",
        "and not (true or has_column_privilege(",
        ("tests/security/test_table_owner.py", "-k", "no_rights_on"),
    ),
    Mutant(
        "the role that logged in counts",
        "sql/code/1_foundations/caller.sql",
        "when pg_catalog.current_setting('role') operator(pg_catalog.=) 'none' then session_user",
        "when true then session_user",
        (OTHERS, "-k", "pooled or transactions_of_two or set_role"),
    ),
    # An application and a receiver that is well.
    Mutant(
        "breaker: a message's own fault counts",
        "sql/code/4_claiming/breaker.sql",
        "continue when ulak_private.is_messages_fault(p_errors[i]);",
        "",
        (f"{APPLICATION}::test_its_own_time_outs_open_no_circuit",),
    ),
    Mutant(
        "breaker: a probe has its own time-out",
        "sql/code/4_claiming/lease_messages.sql",
        "e.headers - ':timeout'",
        "e.headers",
        (f"{APPLICATION}::test_its_impatient_messages_close_a_circuit_by_the_endpoints_own_time_out",),
    ),
    Mutant(
        "breaker: the same probe again",
        "sql/code/4_claiming/breaker.sql",
        "and q.id is distinct from e.circuit_probe_id\n",
        "\n",
        ("tests/db/test_breaker.py::test_a_message_is_not_the_probe_twice_in_turn_while_another_waits",),
    ),
    # Forgeries.
    Mutant(
        "headers: an underscore is no hyphen",
        "sql/code/1_foundations/values.sql",
        "select translate(lower(p_name collate \"C\"), '_', '-')",
        'select lower(p_name collate "C")',
        (f"{APPLICATION}::test_it_cannot_send_a_header_that_only_ulak_sets",),
    ),
    Mutant(
        "headers: an underscore is no hyphen to the worker",
        "plpython/ulak/transports/http/header.py",
        'return name.lower().replace("_", "-")',
        "return name.lower()",
        (f"{APPLICATION}::test_a_forged_event_that_waits_already_is_not_delivered",),
    ),
    Mutant(
        "content type: of an event",
        "sql/code/3_sending/check_message.sql",
        "l.name = 'content-type' and ulak_private.is_cloudevents_type(h.value #>> '{}')",
        "false",
        (f"{APPLICATION}::test_it_cannot_send_a_body_that_is_an_event_of_its_own_making",),
    ),
    Mutant(
        "path: encoded letters",
        "sql/code/3_sending/request.sql",
        "when v_path ~ '%(2d|2e|5f|3[0-9]|4[1-9a-f]|5[0-9a]|6[1-9a-f]|7[0-9a])'",
        "when false",
        (f"{APPLICATION}::test_it_cannot_hide_a_path_from_the_check",),
    ),
    Mutant(
        "path: orders to a service",
        "sql/code/3_sending/request.sql",
        "or v_is_sigv4 and m.name ~ '^x[-_]amz[-_]|^action$|[%+]'",
        "",
        (f"{APPLICATION}::test_it_cannot_have_an_order_to_the_service_signed_by_the_endpoints_key",),
    ),
    Mutant(
        "route: any value",
        "plpython/ulak/transports/broker/route.py",
        "        for each in self._separators:\n",
        "        for each in ():\n",
        (f"{APPLICATION}::test_its_metadata_leads_to_no_other_part_of_a_broker",),
    ),
    # Secrets.
    Mutant(
        "secrets: anywhere in a config",
        "sql/code/2_endpoints/protocols.sql",
        "v_violation := ulak_private.secrets_violation(p_protocol, p_config, p_endpoint_id);",
        "",
        (
            f"{ADMIN}::test_a_secret_stands_only_where_a_credential_belongs",
            f"{ADMIN}::test_the_signing_secret_of_another_endpoint_can_not_be_named",
        ),
    ),
    Mutant(
        "curl: a body of ours without the mask",
        "plpython/ulak/transports/http/curl_command.py",
        "body if body in payloads else mask.hide(body)",
        "body",
        (f"{ADMIN}::test_curl_hides_a_secret_in_a_body_that_is_no_payload",),
    ),
    Mutant(
        "curl: a body may name a file",
        "plpython/ulak/transports/http/curl_command.py",
        '"--data-raw"',
        '"--data-binary"',
        (f"{ADMIN}::test_curl_sends_a_body_as_it_is_and_no_file",),
    ),
    Mutant(
        "echo: of a message's path",
        "plpython/ulak/transports/http/verdict.py",
        "    own += secrecy.own_path(request, endpoint.profile.url)\n",
        "",
        (f"{RECEIVER}::test_what_a_receiver_decodes_of_a_messages_path_reaches_no_monitor",),
    ),
    Mutant(
        "fail: with a secret of the endpoint",
        "sql/code/5_settling/reports.sql",
        "foreach v_secret in array p_secrets loop",
        "foreach v_secret in array p_secrets[1:0] loop",
        (f"{PULL_WORKER}::test_its_reasons_show_no_secret_that_its_endpoint_names",),
    ),
    Mutant(
        "fail: with secrets of others",
        "sql/code/4_claiming/external_workers.sql",
        """    if not ulak_private.works_everywhere() then
        p_ids := ulak_private.workable_messages(p_ids);
    end if;
    if p_retry_after is not null then""",
        "    if p_retry_after is not null then",
        (f"{PULL_WORKER}::test_its_reasons_show_no_secret_that_its_endpoint_names",),
    ),
    Mutant(
        "notify: more than a bell",
        "sql/code/3_sending/wake_up.sql",
        "perform pg_notify('ulak_bell', '');",
        "perform pg_notify('ulak_bell', (select max(event) from ulak.event_log));",
        ("tests/security/test_nobody.py::test_a_role_that_may_only_connect_hears_nothing_but_the_bell",),
    ),
    # The network.
    Mutant(
        "console: a connection too many waits",
        "docker/console/ulak_console/__main__.py",
        "            each.channel_class = Channel\n",
        "            pass\n",
        (f"{NETWORK}::test_connections_that_say_nothing_silence_no_console",),
    ),
    Mutant(
        "node: any server will do",
        "docker/node/worker.py",
        "if not arguments.insecure and (host := exposed(dsn)):",
        "if host := None:",
        (f"{NETWORK}::test_a_node_takes_no_code_from_a_server_without_verify_full",),
    ),
    Mutant(
        "node: a session takes many numbers",
        "sql/code/7_running/node.sql",
        "w.slot > 100 and w.pid = pg_backend_pid()",
        "false",
        ("tests/security/test_node.py::test_one_session_takes_one_number_of_the_thousand",),
    ),
    Mutant(
        "report: as it is stored",
        "plpython/ulak/report/markup.py",
        "html.escape(text.storable(str(value)))",
        "html.escape(str(value))",
        (f"{RECEIVER}::test_a_stored_text_that_xml_cannot_hold_makes_a_report_that_can_be_read",),
    ),
    # Hosts that may be called.
    Mutant(
        "hosts: a config names any",
        "sql/code/2_endpoints/hosts.sql",
        "    if v_allowed is null then\n",
        "    if true then\n",
        ("tests/db/test_hosts.py::test_a_config_names_no_host_that_is_not_allowed",),
    ),
    Mutant(
        "hosts: a wildcard without its dot",
        "sql/code/2_endpoints/hosts.sql",
        "right(p_host, length(l.name) - 1) = substr(l.name, 2)",
        "right(p_host, length(l.name) - 2) = substr(l.name, 3)",
        ("tests/db/test_hosts.py::test_a_config_names_no_host_that_is_not_allowed",),
    ),
    Mutant(
        "hosts: any is dialled over HTTP",
        "plpython/ulak/transports/http/client.py",
        "raise ConfigError(refusal)",
        "pass",
        (f"{ADMIN}::test_no_host_is_dialled_that_is_not_allowed",),
    ),
    Mutant(
        "hosts: any broker is dialled",
        "plpython/ulak/transports/broker/dial.py",
        "if refusal := guard.host_refusal(host):",
        "if (refusal := guard.host_refusal(host)) and not host:",
        ("tests/worker/test_nats.py::test_an_advertised_host_that_is_not_allowed_is_not_dialled",),
    ),
    Mutant(
        "hosts: any that a Kafka cluster names is dialled",
        "plpython/ulak/transports/kafka/reach.py",
        "if refusal := self._guard.host_refusal(host):",
        "if (refusal := self._guard.host_refusal(host)) and not host:",
        (f"{KAFKA}::test_a_broker_that_the_cluster_names_gets_no_secret_that_is_bound_to_others",),
    ),
    Mutant(
        "addresses: any that a Kafka cluster names is dialled",
        "plpython/ulak/transports/kafka/reach.py",
        "if refusal := self._guard.refusal(address):",
        "if (refusal := self._guard.refusal(address)) and not address:",
        (f"{KAFKA}::test_a_forbidden_broker_that_the_cluster_names_is_not_dialled",),
    ),
    Mutant(
        "addresses: librdkafka dials by itself",
        "plpython/ulak/transports/kafka/librdkafka.py",
        "    _rd.conf_set_connect_cb(conf, connect)\n",
        "",
        (f"{KAFKA}::test_a_forbidden_broker_that_the_cluster_names_is_not_dialled",),
    ),
    # Secrets that are bound to hosts.
    Mutant(
        "bound secrets: a worker gets any",
        "sql/code/2_endpoints/secrets.sql",
        "when r.problem is not null then null",
        "when false then null",
        (f"{BOUND}::test_it_goes_nowhere_if_one_of_them_is_not_listed",),
    ),
    Mutant(
        "bound secrets: a config names any",
        "sql/code/2_endpoints/protocols.sql",
        "case when v_has_secrets and p_config is distinct from p_old then",
        "case when false then",
        (f"{BOUND}::test_it_goes_nowhere_if_one_of_them_is_not_listed",),
    ),
    Mutant(
        "bound secrets: a proxy doesn't count",
        "sql/code/2_endpoints/bound_secrets.sql",
        "when p_protocol <> 'http' or h.key = 'proxy.url' then true",
        "when p_protocol <> 'http' then true when h.key = 'proxy.url' then p_place like 'proxy/%'",
        (f"{BOUND}::test_it_goes_nowhere_if_one_of_them_is_not_listed",),
    ),
    Mutant(
        "bound secrets: who gets the token doesn't count",
        "sql/code/2_endpoints/bound_secrets.sql",
        "else p_place not like 'proxy/%'",
        "else p_place not like 'proxy/%' and p_config #>> '{auth,type}' is distinct from 'oauth2'",
        (f"{BOUND}::test_it_goes_nowhere_if_one_of_them_is_not_listed",),
    ),
    Mutant(
        "bound secrets: brokers of a cluster get any",
        "plpython/ulak/transports/broker/transport.py",
        "guard = self._guard.within(endpoint.bound)",
        "guard = self._guard",
        ("tests/worker/test_nats.py::test_an_advertised_host_gets_no_secret_that_is_bound_to_others",),
    ),
    # A document of the whole configuration.
    Mutant(
        "config(): shows credentials",
        "sql/code/7_running/apply.sql",
        "jsonb_object_agg(e.name, ulak_private.without_credentials(e.value))",
        "jsonb_object_agg(e.name, e.value)",
        ("tests/db/test_apply.py::test_credentials_are_never_shown_and_stay_where_they_are_masked",),
    ),
    Mutant(
        "apply(): endpoints in any order",
        "sql/code/7_running/apply.sql",
        "    perform ulak_private.lock_changed_endpoints(v_steps);\n",
        "",
        ("tests/concurrency/test_apply_races.py::test_endpoints_are_locked_in_the_order_of_their_ids",),
    ),
    Mutant(
        "apply(): a refused entry alone is left out",
        "sql/code/7_running/apply.sql",
        "    if v_refusals <> '{}' then\n",
        "    if false then\n",
        ("tests/db/test_apply.py::test_every_refused_entry_is_reported_and_nothing_is_changed",),
    ),
    # Files that a config names.
    Mutant(
        "files: nobody looks",
        FILES,
        "return tuple(_judged(path, content)[0] for path, content in named)",
        "return ()",
        (f"{FILE}[tls_ca_bundle]", f"{ADMIN}::test_ping_does_not_wait_for_a_file_either"),
    ),
    Mutant(
        "files: a FIFO or a device may be one",
        FILES,
        """    if os.path.abspath(path).startswith("/proc/") or not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST:
            raise ValueError
        data = os.read(descriptor, LARGEST)
""",
        """    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        data = os.read(descriptor, LARGEST)
""",
        (f"{FILE}[tls_ca_bundle]",),
    ),
    Mutant(
        "files: of any size",
        FILES,
        "or found.st_size > LARGEST",
        "",
        (f"{FILE}[tls_ca_bundle]",),
    ),
    Mutant(
        "files: whether one exists is told",
        FILES,
        "except (OSError, ValueError):\n        raise ConfigError(PROBLEM) from None",
        "except ValueError:\n        raise ConfigError(PROBLEM) from None\n    except OSError as error:\n        raise ConfigError(str(error)) from None",
        (f"{FILE}[tls_client_cert]",),
    ),
    Mutant(
        "files: looked at once",
        FILES,
        "return _identity(os.stat(self.path)) != self.identity",
        "return False",
        (f"{ADMIN}::test_a_file_that_is_replaced_counts_from_then_on",),
    ),
    # Echoes.
    Mutant(
        "echo: of everything but a payload",
        "plpython/ulak/transports/http/verdict.py",
        "answer = endpoint.private.hide(answer, own, is_cut)",
        "pass",
        (ECHO,),
    ),
    Mutant(
        "echo: of basic credentials",
        SECRECY,
        'yield b64encode(f"{user}:{password}".encode()).decode().rstrip("=")',
        "pass",
        (f"{RECEIVER}::test_a_token_server_that_echoes_gives_no_secret_away",),
    ),
    Mutant(
        "echo: of an access key and a session token",
        SECRECY,
        '("password", "token", "client_secret", "access_key", "secret_key", "session_token")',
        '("password", "token", "client_secret", "secret_key")',
        (f"{ECHO}[sigv4]",),
    ),
    Mutant(
        "echo: of what is made of a secret for a request",
        "plpython/ulak/safety/mask.py",
        '_SECRET_NAMES = ("api-key",',
        '_SECRET_NAMES: tuple[str, ...] = ()\n_UNUSED = ("api-key",',
        (
            ECHO,
            f"{ADMIN}::test_a_captured_answer_and_a_ping_show_no_secret_that_was_echoed",
            f"{ADMIN}::test_a_signature_is_shown_in_no_header_whatever_its_name_is",
        ),
    ),
    Mutant(
        "echo: of named secrets",
        SECRECY,
        "    named = set(named)\n    yield from named\n",
        "    named = set(named)\n",
        (ECHO, f"{ADMIN}::test_curl_shows_no_secret_wherever_it_stands"),
    ),
    Mutant(
        "echo: of a url",
        SECRECY,
        "        if isinstance(url, str):\n            yield from _location(url)\n",
        "        pass\n",
        (ECHO,),
    ),
    Mutant(
        "echo: of a payload",
        "plpython/ulak/transports/http/verdict.py",
        "answer = secrecy.hide_payload(text.line(answer), request, endpoint.lines, endpoint.profile.url)",
        "answer = text.line(answer)",
        (ECHO, f"{RECEIVER}::test_an_error_that_names_a_field_stays_readable"),
    ),
    # What can't be read.
    Mutant(
        "config: one that isn't UTF-8 ends the run",
        "plpython/ulak/messages/delivery.py",
        "        if self.config is None:\n            raise ConfigError(\"it can't be read: it isn't valid UTF-8, or has a number with too many digits\")\n",
        "        assert self.config is not None\n",
        (f"{ADMIN}::test_a_config_that_cannot_be_read_costs_no_other_endpoint_its_deliveries",),
    ),
    Mutant(
        "text: nothing is cleaned",
        "plpython/ulak/safety/text.py",
        "def line(text: str, longest: int = LONGEST_LINE) -> str:",
        '_UNPRINTABLE = _SURROGATE = _UNSTORABLE = re.compile(r"(?!)")\n\n\ndef line(text: str, longest: int = LONGEST_LINE) -> str:',
        (
            f"{RECEIVER}::test_no_token_server_can_end_a_run",
            f"{RECEIVER}::test_no_answer_can_end_a_run_in_a_database_that_cannot_hold_it",
            f"{RECEIVER}::test_a_certificate_of_any_text_cannot_end_a_run",
        ),
    ),
    Mutant(
        "text: of any length",
        "plpython/ulak/transports/http/oauth.py",
        "text.line(code, 200)",
        "code",
        (f"{RECEIVER}::test_no_token_server_can_end_a_run",),
    ),
    Mutant(
        "token: a life of too many digits",
        "plpython/ulak/transports/http/oauth.py",
        "except (TypeError, ValueError, OverflowError):",
        "except (TypeError, ValueError):",
        (f"{RECEIVER}::test_no_token_server_can_end_a_run",),
    ),
    # NATS, whose server speaks first.
    Mutant(
        "nats: what follows the greeting in the clear is believed",
        NATS,
        "elif self._operations.is_at_end:",
        "elif True:",
        ("tests/unit/test_nats.py::test_a_greeting_that_goes_on_in_the_clear_is_not_believed",),
    ),
    Mutant(
        "send: a message commands a broker",
        "sql/code/3_sending/check_message.sql",
        "or l.name ~ p.reserved_headers",
        "",
        (f"{APPLICATION}::test_it_can_neither_command_a_broker_nor_forge_an_event_by_a_header",),
    ),
    Mutant(
        "nats: any answer is an acknowledgement",
        NATS,
        """if payload.startswith(b'{"stream":') and b'"seq"' in payload and b'"error"' not in payload:""",
        "if True:",
        ("tests/unit/test_nats.py::test_only_what_a_stream_has_taken_is_delivered",),
    ),
    # The notification queue, which has 8 GB before PostgreSQL 17.
    Mutant(
        "notify: into a queue that is full",
        "sql/code/3_sending/wake_up.sql",
        " and pg_notification_queue_usage() < 0.5 then",
        " then",
        ("tests/chaos/test_notifications.py",),
    ),
    # A worker that relies on old facts.
    Mutant(
        "settings: a claim goes by older ones",
        "sql/code/4_claiming/claim.sql",
        "if v_turn.tids is not null and current_setting('ulak_private.settings', true) <> '' and ulak_private.has_old_settings() then",
        "if false then",
        ("tests/concurrency/test_settings_races.py::test_a_worker_claims_nothing_until_it_has_the_current_settings",),
    ),
    Mutant(
        "digest: about digests",
        "sql/code/6_afterwards/operator_events.sql",
        "        where not ulak_private.is_own_event(to_jsonb(t))\n",
        "",
        ("tests/db/test_operator_events.py::test_a_digest_that_cannot_be_delivered_is_in_no_digest",),
    ),
    Mutant(
        "digest: not owed",
        "sql/code/6_afterwards/operator_events.sql",
        "v_endpoint_ids, v_payloads, true, p_now);",
        "v_endpoint_ids, v_payloads, false, p_now);",
        (
            "tests/db/test_operator_events.py::test_a_digest_is_owed_by_a_full_queue_and_says_how_many_letters_had_no_event_of_their_own",
        ),
    ),
    Mutant(
        "digest: silent about what was left out",
        "sql/code/6_afterwards/operator_events.sql",
        "            return v_places;\n",
        "            return null;\n",
        (
            "tests/db/test_operator_events.py::test_a_digest_is_owed_by_a_full_queue_and_says_how_many_letters_had_no_event_of_their_own",
        ),
    ),
    Mutant(
        "log: dead letters unasked",
        "sql/code/6_afterwards/operator_events.sql",
        """    if ulak_private.has_subscribers('ulak.endpoint.dead_letters') or ulak_private.stored_setting('log_dlq')::boolean then""",
        "    if true then",
        ("tests/db/test_operator_events.py::test_without_a_subscriber_nothing_is_counted",),
    ),
    Mutant(
        "log: dead letters unasked, from counts for digests",
        "sql/code/6_afterwards/operator_events.sql",
        """    if ulak_private.stored_setting('log_dlq')::boolean then
        perform""",
        """    if true then
        perform""",
        ("tests/db/test_operator_events.py::test_a_digest_is_no_line_of_the_servers_log",),
    ),
]
