#!/bin/bash
# Builds the images of docker/ and runs them, without a registry and without a daemon: buildah, in a chroot, upon a Debian that
# debootstrap has made. What it proves: the image is clean, POSTGRES_DB names the database, workers deliver in it, the demo is
# what compose adds and ends with, data stays where PGDATA says, the console lets an operator in, a node and the exporter work and aren't
# root, and the image of files has the extension's files alone.
#   sudo tests/docker/run.sh          or: make docker-test
# Kept for the next time in the run folder; to begin anew: rm -rf .run/docker
set -euo pipefail
umask 022

project=$(cd "$(dirname "$0")/../.." && pwd)
folder=${ULAK_RUN:-$project/.run}/docker
# Where this machine's own packages come from.
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | sed -n 1p)}
major=${PG_MAJOR:-15}
# Below those that the kernel gives to connections.
port=${PORT:-13029}
console_port=${CONSOLE_PORT:-13028}
receiver_port=${RECEIVER_PORT:-13027}
exporter_port=${EXPORTER_PORT:-13026}

if [ "$(id -u)" != 0 ]; then
    echo "only root can make a Debian: sudo make docker-test" >&2
    exit 1
fi
missing=()
for package in buildah debootstrap; do
    command -v "$package" > /dev/null || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ]; then
    apt-get update -q
    apt-get install -q -y --no-install-recommends -o DPkg::Lock::Timeout=300 "${missing[@]}"
fi

mkdir -p "$folder"
# vfs needs no overlay file system; the isolation needs no namespaces; the network is this machine's.
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
buildah=(buildah --root "$folder/storage" --runroot "$folder/runroot")
image() {
    "${buildah[@]}" "$@"
}

say() {
    printf '\n== %s\n' "$*"
}

# In place of debian:bookworm-slim, and of the official postgres, whose promises docker-entrypoint.sh keeps.
make_bases() {
    if [ ! -e "$folder/base-made" ]; then
        rm -rf "$folder/base"
        debootstrap --variant=minbase --include=ca-certificates bookworm "$folder/base" "$mirror"
        rm -rf "$folder"/base/var/lib/apt/lists/* "$folder"/base/var/cache/apt/archives/*.deb
        printf '#!/bin/sh\nexit 101\n' > "$folder/base/usr/sbin/policy-rc.d"
        chmod +x "$folder/base/usr/sbin/policy-rc.d"
        touch "$folder/base-made"
    fi
    cat > "$folder/Dockerfile.debian" <<'DOCKERFILE'
FROM scratch
COPY base /
CMD ["bash"]
DOCKERFILE
    cat > "$folder/Dockerfile.postgres" <<DOCKERFILE
FROM localhost/ulak-test-debian
RUN apt-get update && apt-get install -y --no-install-recommends postgresql-$major && rm -rf /var/lib/apt/lists/* /var/lib/postgresql/*
COPY docker-entrypoint.sh /usr/local/bin/
ENV PATH=/usr/lib/postgresql/$major/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PGDATA=/var/lib/postgresql/data
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["postgres"]
DOCKERFILE
    cp "$project/tests/docker/docker-entrypoint.sh" "$folder/"
    image bud -q --layers -t ulak-test-debian -f "$folder/Dockerfile.debian" "$folder"
    image bud -q --layers -t ulak-test-postgres -f "$folder/Dockerfile.postgres" "$folder"
}

# Each runs in a process group of its own, so that it ends with everything it has started. INT is a fast
# shutdown to PostgreSQL; the others go by TERM.
running=()
made=()
end_last() {
    local pid=${running[-1]} i
    kill -INT -- "-$pid" 2>/dev/null || true
    kill -TERM -- "-$pid" 2>/dev/null || true
    for i in $(seq 100); do
        kill -0 -- "-$pid" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL -- "-$pid" 2>/dev/null || true
    unset 'running[-1]'
}
end_all() {
    local each
    while [ "${#running[@]}" -gt 0 ]; do end_last; done
    for each in "${made[@]}"; do
        image umount "$each" > /dev/null || true
        image rm "$each" > /dev/null || true
    done
}
trap end_all EXIT
# start LOG COMMAND...
start() {
    local log=$folder/$1.log
    shift
    setsid "$@" > "$log" 2>&1 &
    running+=($!)
}
make_container() {
    container=$(image from "$1")
    made+=("$container")
    root=$(image mount "$container")
}

# until_true SECONDS WHAT COMMAND...
until_true() {
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            echo "not within time: $what" >&2
            tail -n 30 "$folder"/*.log >&2
            exit 1
        fi
        sleep 0.5
    done
    echo "ok: $what"
}

# is EXPECTED WHAT COMMAND...
is() {
    local expected=$1 what=$2 found
    shift 2
    found=$("$@")
    if [ "$found" != "$expected" ]; then
        printf 'wrong: %s\n  expected: %s\n  found: %s\n' "$what" "$expected" "$found" >&2
        exit 1
    fi
    echo "ok: $what"
}

# The server of the container that was made last, as `docker run` would start it: entrypoint and command of the image.
start_server() {
    start server "${buildah[@]}" run --user root --env PGPORT="$port" --env POSTGRES_PASSWORD=secret "$@" "$container" -- \
        ulak-entrypoint.sh postgres -p "$port"
    until_true 60 "the server answers" chroot "$root" "/usr/lib/postgresql/$major/bin/pg_isready" -q -h 127.0.0.1 -p "$port"
}
# query DATABASE SQL: by the image's own psql, with the password.
query() {
    PGPASSWORD=secret chroot "$root" "/usr/lib/postgresql/$major/bin/psql" -XAtq -h 127.0.0.1 -p "$port" -U postgres -d "$1" -c "$2"
}
is_true() {
    [ "$(query "$1" "$2")" = t ]
}

make_bases
say "the images"
image bud -q --layers -t ulak-test -f "$project/docker/image/Dockerfile" --build-arg PG_MAJOR="$major" \
    --build-arg DEBIAN=localhost/ulak-test-debian --build-arg BASE=localhost/ulak-test-postgres "$project"
image bud -q --layers -t ulak-console-test --build-arg DEBIAN=localhost/ulak-test-debian "$project/docker/console"
image bud -q --layers -t ulak-node-test --build-arg DEBIAN=localhost/ulak-test-debian "$project/docker/node"

image bud -q --layers -t ulak-extension-test --build-arg DEBIAN=localhost/ulak-test-debian -f "$project/docker/image/extension.Dockerfile" "$project"

say "the image of files alone"
make_container ulak-extension-test
version=$(sed -n "s/^default_version *= *'\(.*\)'/\1/p" "$project/control/ulak.control")
layout() {
    (cd "$root" && find . -type f | sed 's|/ulak--[0-9.-]*\.sql|/ulak--*.sql|' | sort -u | paste -sd ' ')
}
is "./licenses/ulak ./share/extension/ulak--*.sql ./share/extension/ulak.control" "it has the extension's files and the license" layout
is "ulak--$version.sql" "it has the script of this version" ls "$root/share/extension/" --ignore='ulak--*--*' --ignore='*.control' --ignore='ulak--0.[12].*'

say "the image alone, with POSTGRES_DB=shop"
data=/var/lib/postgresql/$major/docker
make_container ulak-test
start_server --env POSTGRES_DB=shop --env "PGDATA=$data"
is "false|" "internal addresses are blocked" query shop \
    "select ulak.setting('http_allow_internal_urls'), ulak.setting('http_allowed_networks')"
is 0 "it has no endpoint" query shop "select count(*) from ulak.endpoints"
is postgres "only the server's own role has a password" query shop \
    "select string_agg(rolname, ' ') from pg_authid where rolpassword is not null"
is "$data" "the data is where PGDATA says" query shop "show data_directory"
until_true 100 "pg_cron has started a worker in shop" is_true shop \
    "select exists (select from ulak.get_worker_status() where state = 'running')"
query shop "select ulak.create_endpoint('kept', 'pull', '{}')" > /dev/null
end_last
start_server --env POSTGRES_DB=shop --env "PGDATA=$data"
is kept "the data is there again after a restart" query shop "select name from ulak.endpoints"
end_last

say "what compose adds: a receiver, logins, the console"
make_container ulak-test
sed "s|http://receiver:8080/|http://127.0.0.1:$receiver_port/|; s|172.16.0.0/12|127.0.0.0/8|" \
    "$project/docker/demo/demo.sql" > "$root/docker-entrypoint-initdb.d/50_demo.sql"
start receiver python3 -u "$project/docker/demo/receiver.py" "$receiver_port"
# A console on another machine, as in compose, is asked for its password anyway; here it comes from this one.
start_server --env POSTGRES_INITDB_ARGS=--auth-host=scram-sha-256 --env ULAK_SCRAPER_PASSWORD=scraper --env ULAK_OPERATOR_PASSWORD=operator \
    --env ULAK_NODE_PASSWORD=node
query postgres "select ulak.send('receiver', '{\"hello\": \"world\"}')" > /dev/null
until_true 100 "the receiver got the message" grep -q '"hello": *"world"' "$folder/receiver.log"

hello() {
    "${buildah[@]}" run --user postgres --env PGHOST=127.0.0.1 --env PGPORT="$port" --env PGUSER=postgres --env PGPASSWORD=secret \
        --env CONSOLE="http://localhost:$console_port" --env ULAK_OPERATOR_PASSWORD=operator --volume "$project/docker/demo/hello.sh:/hello.sh:ro" \
        "$container" -- bash /hello.sh
}
hello | tee "$folder/hello.log"
is "The console: http://localhost:$console_port, role ulak_operator, password operator" \
    "compose ends with a message that was delivered, and says where the console is" tail -n 1 "$folder/hello.log"
is 1 "it says so" grep -c 'was delivered\.$' "$folder/hello.log"
start exporter "${buildah[@]}" run --user nobody --env PGHOST=127.0.0.1 --env PGPORT="$port" --env PGUSER=ulak_scraper --env PGPASSWORD=scraper \
    --env PGDATABASE=postgres --volume "$project/docker/monitoring/prometheus/exporter.py:/exporter.py:ro" "$container" -- \
    python3 -u /exporter.py "$exporter_port"
until_true 30 "the exporter serves metrics, as nobody" bash -c 'curl -sf http://127.0.0.1:'"$exporter_port"'/metrics | grep -q ^ulak_'

server_root=$root
query postgres "select count(*) from ulak.start(0)" > /dev/null
make_container ulak-node-test
is nobody "a node is nobody" "${buildah[@]}" run "$container" -- id -un
start node "${buildah[@]}" run --env PGHOST=127.0.0.1 --env PGPORT="$port" --env PGDATABASE=postgres --env PGUSER=node_1 \
    --env PGPASSWORD=node "$container" -- python3 -B /opt/ulak/worker.py
root=$server_root
until_true 60 "a node has logged in, and no worker is left in the database" is_true postgres \
    "select count(*) filter (where host is not null) = 1 and count(*) filter (where host is null) = 0
     from ulak.get_worker_status() where state = 'running'"
query postgres "select ulak.send('receiver', '{\"from\": \"a node\"}')" > /dev/null
until_true 60 "the receiver got the message of the node" grep -q '"from": *"a node"' "$folder/receiver.log"

make_container ulak-console-test
start console "${buildah[@]}" run --env ULAK_CONSOLE_LISTEN="127.0.0.1:$console_port" \
    --env "ULAK_CONSOLE_DATABASE=host=127.0.0.1 port=$port dbname=postgres" "$container" -- python3 -m ulak_console
address=http://127.0.0.1:$console_port
jar=$folder/cookies
until_true 30 "the console answers" curl -sf -c "$jar" -o "$folder/login.html" "$address/login"
log_in() {
    local token
    token=$(sed -n 's/.*name="token" value="\([^"]*\)".*/\1/p' "$folder/login.html")
    curl -s -L -b "$jar" -c "$jar" -H "Origin: $address" -d "token=$token" -d role=ulak_operator -d password=operator "$address/login"
}
log_in > "$folder/overview.html"
is 1 "an operator logs in and sees the report" grep -c "ulak_operator <b>admin</b>" "$folder/overview.html"

say "all is well"
