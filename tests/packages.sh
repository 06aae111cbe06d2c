#!/bin/bash
# Debian's packages from nothing: built in one fresh Debian, and in another one, which never sees the project, installed by apt, set up
# by ulak-setup, and made to deliver. With a clock.
#   tests/packages.sh bookworm       or: make test-packages
# The bare Debian is kept for the next time; to begin anew: rm -rf .run/packages-bookworm
set -euo pipefail
umask 022

project=$(cd "$(dirname "$0")/.." && pwd)
release=${1:?which release: bookworm (Debian 12), trixie (Debian 13)}
folder=${ULAK_RUN:-$project/.run}/packages-$release
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

make_debian() {
    # A release that is newer than debootstrap is made as the one before it was.
    local script=/usr/share/debootstrap/scripts/$release
    [ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid
    rm -rf "$folder"
    mkdir -p "$folder"
    debootstrap --variant=minbase --include=ca-certificates "$release" "$folder/bare" "$mirror" "$script"
    # No server starts because it was installed.
    printf '#!/bin/sh\nexit 101\n' > "$folder/bare/usr/sbin/policy-rc.d"
    chmod +x "$folder/bare/usr/sbin/policy-rc.d"
    # A mirror may be some days behind.
    echo 'Acquire::Check-Valid-Until "false";' > "$folder/bare/etc/apt/apt.conf.d/mirror"
    touch "$folder/made"
}

# take NAME: a copy of the bare one, with this machine's network, names and certificates.
take() {
    rm -rf "${folder:?}/$1"
    cp -a --reflink=auto "$folder/bare" "$folder/$1"
    cp -L /etc/resolv.conf /etc/hosts "$folder/$1/etc/"
    cp -L /etc/ssl/certs/ca-certificates.crt "$folder/$1/etc/ssl/certs/"
}

# within NAME COMMAND: what is mounted and started is gone with the command.
within() {
    unshare --mount --pid --fork --kill-child bash -c '
        set -euo pipefail
        root=$1
        mount --rbind /dev "$root/dev"
        mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
        mount -t proc proc "$root/proc"
        mount --rbind /sys "$root/sys"
        exec chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 HOME=/root DEBIAN_FRONTEND=noninteractive \
            /bin/bash -euo pipefail -c "$2"
    ' packages "$folder/$1" "$2"
}

say() {
    printf '\n== %s: %s\n' "$release" "$*"
}

[ -e "$folder/made" ] || make_debian

say "the packages are built, checked by lintian, and tested by autopkgtest"
# Kept, with what was installed in it: what it makes is the subject.
[ -e "$folder/builder" ] || take builder
rm -rf "$folder/builder/srv/ulak"
mkdir -p "$folder/builder/srv/ulak"
cp -R "$project"/[!.]* "$folder/builder/srv/ulak"
rm -rf "$folder/builder/srv/ulak/build"
within builder '
    apt-get update -q
    apt-get install -q -y --no-install-recommends autopkgtest build-essential debhelper devscripts fakeroot git lintian make postgresql-server-dev-all python3 > /dev/null
    cd /srv/ulak
    make deb > /tmp/deb.log 2>&1 || { tail -n 50 /tmp/deb.log; exit 1; }
    cd build/deb
    ls -l *.deb
    # It installs what the test depends on, as apt does.
    autopkgtest -q --apt-upgrade --no-built-binaries ./*.deb "$(ls -d ulak-*/)" -- null
'

say "a fresh Debian installs them, and a message is delivered, with nothing from the project"
take user
mkdir -p "$folder/user/srv/packages"
cp "$folder"/builder/srv/ulak/build/deb/*.deb "$folder/user/srv/packages/"
cp "$project/control/debian/tests/deliver" "$folder/user/srv/deliver"
within user '
    apt-get update -q
    SECONDS=0
    apt-get install -q -y /srv/packages/*.deb > /tmp/install.log 2>&1 || { tail -n 50 /tmp/install.log; exit 1; }
    echo "== apt-get install: $SECONDS s, with PostgreSQL and everything that it needs"
    # As a user begins: the cluster that the package made.
    version=$(ls /etc/postgresql)
    /srv/deliver "$version"
    began=$(date +%s%N)
    ulak-setup --yes "$version" main app > /tmp/setup.log || { cat /tmp/setup.log; exit 1; }
    echo "== ulak-setup $version main app: $((($(date +%s%N) - began) / 1000000)) ms"
    tail -n 20 /tmp/setup.log
    apt-get purge -q -y "postgresql-*-ulak" ulak-common ulak-node ulak-console > /tmp/purge.log 2>&1 || { tail -n 50 /tmp/purge.log; exit 1; }
    test ! -e /usr/bin/ulak-setup && test ! -e /etc/default/ulak-node
    pg_ctlcluster "$version" main stop
'
say "all is well"
