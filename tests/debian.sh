#!/bin/bash
# A fresh Debian in the run folder, and in it what a newcomer runs: make demo, make test.
#   tests/debian.sh bookworm                   both
#   tests/debian.sh trixie                     both; then, with Debian 12's server beside its own, tests/majors
#   tests/debian.sh trixie tests/db -k send    only these tests
#   tests/debian.sh trixie tests/majors        from one server to the other
#   tests/debian.sh trixie -- make lint        any other command, in the project's folder
# Kept for the next time; what was installed in it stays. To begin anew: rm -rf .run/debian-trixie
set -euo pipefail
umask 022

project=$(cd "$(dirname "$0")/.." && pwd)
release=${1:?which release: bookworm (Debian 12), trixie (Debian 13), forky (Debian 14)}
shift
folder=${ULAK_RUN:-$project/.run}/debian-$release
root=$folder/root
# Where this machine's own packages come from.
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | sed -n 1p)}

if [ "$(id -u)" != 0 ]; then
    echo "only root can make a Debian" >&2
    exit 1
fi
command -v debootstrap > /dev/null || {
    apt-get update -q
    apt-get install -q -y --no-install-recommends -o DPkg::Lock::Timeout=300 debootstrap
}

# Only what is needed to type make. No list of packages, as on a machine that never asked for one, and no server that starts
# because it was installed.
make_debian() {
    # A release that is newer than debootstrap is made as the one before it was.
    local script=/usr/share/debootstrap/scripts/$release
    [ -e "$script" ] || script=/usr/share/debootstrap/scripts/trixie
    rm -rf "$root"
    mkdir -p "$root"
    debootstrap --variant=minbase --include=ca-certificates,make "$release" "$root" "$mirror" "$script"
    rm -rf "$root"/var/lib/apt/lists/*
    printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
    chmod +x "$root/usr/sbin/policy-rc.d"
    # A mirror may be some days behind, and a release that isn't out yet says how long its list holds.
    echo 'Acquire::Check-Valid-Until "false";' > "$root/etc/apt/apt.conf.d/mirror"
    touch "$folder/made"
}

# The project as git has it, and what was changed since. The network is this machine's, with its names and its certificates.
fill_debian() {
    rm -rf "$root/srv/ulak.new"
    mkdir -p "$root/srv/ulak.new"
    cp -R "$project"/[!.]* "$project/.ci" "$root/srv/ulak.new"
    if [ -d "$root/srv/ulak/.run" ]; then mv "$root/srv/ulak/.run" "$root/srv/ulak.new"; fi
    rm -rf "$root/srv/ulak"
    mv "$root/srv/ulak.new" "$root/srv/ulak"
    cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
    cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
}

[ -e "$folder/made" ] || make_debian
fill_debian

# Debian 12's server is installed from its own packages, and only that. Of its pycurl, which can't be installed beside the one
# for a newer Python, the one file that is made for the older.
cat > "$root/srv/add-debian12.sh" <<'SCRIPT'
set -euo pipefail
[ ! -e /usr/lib/python3/dist-packages/pycurl.cpython-311-*.so ] || exit 0
echo "deb $1 bookworm main" > /etc/apt/sources.list.d/bookworm.list
printf 'Package: *\nPin: release n=bookworm\nPin-Priority: 100\n' > /etc/apt/preferences.d/bookworm
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
    postgresql-15 postgresql-plpython3-15 postgresql-15-cron
folder=$(mktemp -d)
chmod a+rx "$folder"
cd "$folder"
apt-get download -q python3-pycurl/bookworm
dpkg -x python3-pycurl_*.deb .
cp usr/lib/python3/dist-packages/pycurl.cpython-311-*.so /usr/lib/python3/dist-packages/
SCRIPT
majors="bash /srv/add-debian12.sh $mirror"
majors="$majors && ULAK_OLDER=/usr/lib/postgresql/15/bin/pg_config tests/sandbox.sh python -m pytest"

if [ "$#" = 0 ]; then
    commands="make demo && make demo-stop && make test"
    [ "$release" = bookworm ] || commands="$commands && $majors tests/majors"
elif [ "$1" = -- ]; then
    commands=$(printf '%q ' "${@:2}")
elif [[ $1 == tests/majors* ]]; then
    commands="$majors $(printf '%q ' "$@")"
else
    commands="make test ARGS=$(printf '%q' "$(printf '%q ' "$@")")"
fi
# What is mounted and started is gone with the command: it has mounts and processes of its own. Its /dev/shm, too, so that
# clusters in it are nobody else's.
exec unshare --mount --pid --fork --kill-child bash -c '
    set -euo pipefail
    root=$1
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    chroot "$root" /bin/bash -c "cd /srv/ulak && $2"
' debian "$root" "$commands"
