# ulak: build and install with PGXS; everything that runs goes through tests/sandbox.sh.

EXTENSION = control/ulak
EXTVERSION := $(shell sed -n "s/^default_version *= *'\(.*\)'/\1/p" control/ulak.control)
BUILD ?= build

# sql/schema runs once; the Python section and sql/code are replayed by every upgrade.
SCHEMA := $(sort $(wildcard sql/schema/*.sql))
REPLAYED := $(BUILD)/python.sql $(sort $(wildcard sql/code/*/*.sql))
SCRIPT := $(BUILD)/ulak--$(EXTVERSION).sql
# sql/upgrade/OLD--NEXT.sql has the steps from one version to the next. Each earlier version gets an upgrade straight to this one.
STEPS := $(wildcard sql/upgrade/*.sql)
EARLIER := $(foreach step,$(notdir $(STEPS)),$(firstword $(subst --, ,$(step))))
UPGRADES := $(EARLIER:%=$(BUILD)/ulak--%--$(EXTVERSION).sql)

DATA_built = $(SCRIPT) $(UPGRADES)
EXTRA_CLEAN = $(BUILD)
# Beside the server's programs; Debian's package has it in /usr/bin.
SETUP ?= control/ulak-setup
ifneq ($(SETUP),)
SCRIPTS = $(SETUP)
endif
# For servers without PL/Python.
PLAIN := $(BUILD)/ulak-plain-$(EXTVERSION).sql

.PHONY: build sql deb dist files-image help test test-plain test-clients test-debian12 test-debian13 test-debian14 test-packages docker-test lint reference screenshot demo demo-stop bench chaos soak unstable mutants
.DELETE_ON_ERROR:

build: $(DATA_built) ## build the extension's script

# The folders are prerequisites too, so that a deleted file is noticed.
$(BUILD)/python.sql: plpython/embed.py plpython/loader.py $(shell find plpython/ulak -name "*.py" -o -type d -not -name __pycache__)
	@mkdir -p $(BUILD)
	python3 -B plpython/embed.py > $@

$(SCRIPT): $(SCHEMA) $(REPLAYED) sql/schema sql/code control/ulak.control
	cat $(SCHEMA) $(REPLAYED) > $@

# The steps from that version on, in the order of versions, and then the code.
$(UPGRADES): $(BUILD)/ulak--%--$(EXTVERSION).sql: $(STEPS) $(REPLAYED) sql/code control/ulak.control
	cat $$(ls -v $(STEPS) | sed -n '/\/$*--/,$$p') $(REPLAYED) > $@

sql: $(PLAIN) ## build the plain script: no PL/Python, no superuser, for managed PostgreSQL

$(PLAIN): $(SCHEMA) $(REPLAYED) $(STEPS) sql/schema sql/code $(wildcard sql/upgrade) sql/plain.py sql/plain $(wildcard sql/plain/*) control/ulak.control
	python3 -B sql/plain.py $(EXTVERSION) $(SCHEMA) $(STEPS) $(REPLAYED) > $@

deb: ## build Debian's packages for each server that is installed, into build/deb (needs debhelper, postgresql-server-dev-all)
	control/package.sh deb $(BUILD)

dist: ## build the archive for PGXN, with META.json of the control file, into build/dist; the same files make the same archive
	control/package.sh dist $(BUILD)

# Three processes keep two cores busy, because much of a run is waiting.
test: lint ## install what is missing and run every check; ARGS="tests/db -k send" picks some
	tests/sandbox.sh python -m pytest $(or $(ARGS),-n 3 tests)

lint: ## ruff, mypy and pgspot
	tests/sandbox.sh tests/lint.sh

# Those of tests/servers.txt.
PLAIN_MAJORS ?= 15 16 17 18
test-plain: ## tests/db and tests/plain on servers as managed services have them, PostgreSQL 15 to 18; PLAIN_MAJORS="16 18" picks servers, ARGS as for test
	set -e; for major in $(PLAIN_MAJORS); do \
		ULAK_PLAIN=$$major tests/sandbox.sh python -m pytest $(or $(ARGS),-n 2 tests/db tests/plain); \
	done

test-clients: ## the guide's programs in Python, Node, Go, Java, Ruby and PHP, and through PgBouncer; installs their drivers
	ULAK_CLIENTS=full tests/sandbox.sh python -m pytest tests/clients $(ARGS)

test-debian12: ## make demo and make test in a fresh Debian 12, PostgreSQL 15 (needs root and debootstrap); ARGS as for test
	tests/debian.sh bookworm $(ARGS)

test-debian13: ## the same in Debian 13, PostgreSQL 17
	tests/debian.sh trixie $(ARGS)

test-debian14: ## the same in the coming Debian 14, PostgreSQL 18
	tests/debian.sh forky $(ARGS)

test-packages: ## Debian's packages in a fresh Debian 12 and 13: build, lintian, install, ulak-setup, a delivery (needs root and debootstrap)
	tests/packages.sh bookworm
	tests/packages.sh trixie

reference: ## rewrite sql/REFERENCE.md from the comments in the catalog
	@mkdir -p $(BUILD)
	tests/sandbox.sh python -m support.reference > $(BUILD)/REFERENCE.md
	mv $(BUILD)/REFERENCE.md sql/REFERENCE.md

screenshot: ## retake README's pictures of the console, in a real browser, from the demo
	@mkdir -p $(BUILD)
	tests/sandbox.sh python -m demo.picture > $(BUILD)/pictures.tar
	tar -x -f $(BUILD)/pictures.tar -C docker/pictures --no-same-owner

docker-test: ## build the images of docker/ and run them, with buildah, on a Debian made by debootstrap (needs root)
	tests/docker/run.sh

demo: ## install what is missing; workers deliver 2,000 messages to receivers that are well, moody and down. ARGS=--nodes: nodes do
	ULAK_NEEDS=demo tests/sandbox.sh /usr/bin/python3 -m demo start $(ARGS)

demo-stop: ## remove the demo's cluster
	ULAK_NEEDS=demo tests/sandbox.sh /usr/bin/python3 -m demo stop

bench: ## measure how fast it is; ARGS="send delivery:throughput --scale 0.1" runs some parts with a tenth of the work; "against --against HEAD~3" compares
	tests/sandbox.sh python -m bench $(ARGS)

chaos: ## check that nothing is lost; ARGS="-k name" picks scenarios
	ULAK_CHAOS=full tests/sandbox.sh python -m pytest --timeout=3600 -o faulthandler_timeout=3599 \
		tests/chaos tests/db/test_*_machine.py tests/worker/test_any_message.py tests/concurrency/test_breaker_races.py tests/conventions/test_bench.py $(ARGS)

soak: ## check that nothing grows; ARGS="--minutes 60" sets its length
	tests/sandbox.sh python -m chaos.soak $(ARGS)

unstable: ## run all tests ten times in random order, every second time beside two busy loops; ARGS="--runs 4 tests/db" picks some
	tests/sandbox.sh python -m unstable $(ARGS)

mutants: ## take out one guard or finding after the other, and see its tests fail; ARGS="findings -k queue" picks some
	tests/sandbox.sh python -m mutants $(ARGS)

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16
	@printf 'make install    install into the server of PG_CONFIG (PGXS)\nmake uninstall  remove it\nmake clean      remove what was built\n'

# PGXS brings all, install, uninstall and clean. Building does not need it.
PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs 2>/dev/null)
ifneq ($(wildcard $(PGXS)),)
include $(PGXS)
else
install uninstall:
	$(error no PGXS: install the client package of your server's version, such as postgresql-client-17, or name your PG_CONFIG)
clean:
	rm -rf $(BUILD)
endif
