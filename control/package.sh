#!/bin/bash
# What `make deb` and `make dist` run: the project without its tests and runs, as others build it.
#   control/package.sh deb build      Debian's packages in build/deb
#   control/package.sh dist build     ulak-VERSION.zip in build/dist, for PGXN
set -euo pipefail
umask 022

what=$1
cd "$(dirname "$0")/.."
mkdir -p "$2"
build=$(cd "$2" && pwd)
version=$(sed -n "s/^default_version *= *'\(.*\)'/\1/p" control/ulak.control)
name=ulak-$version
export maintainer=${DEBEMAIL:-ulak@ulak.invalid}
# The same files make the same archive, whenever it is made.
if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)
fi
export SOURCE_DATE_EPOCH LC_ALL=C.UTF-8 TZ=UTC

# copy_project FOLDER
copy_project() {
    rm -rf "$1"
    mkdir -p "$1"
    cp -R Makefile README.md CHANGELOG.md LICENSE control docker plpython sql "$1"
    # For tests alone.
    rm -rf "$1/sql/released"
    find "$1" -name __pycache__ -prune -exec rm -rf {} +
}

make_debian_packages() {
    local folder=$build/deb/$name versions
    rm -rf "$build/deb"
    copy_project "$folder"
    mv "$folder/control/debian" "$folder/debian"
    sed -e "s/@VERSION@/$version/; s/@MAINTAINER@/$maintainer/; s/@DATE@/$(date -R -d "@$SOURCE_DATE_EPOCH")/" \
        "$folder/debian/changelog.in" > "$folder/debian/changelog"
    sed -i "s/@MAINTAINER@/$maintainer/" "$folder/debian/control.in"
    rm "$folder/debian/changelog.in"
    # For each server that is here and not older than what we support.
    versions=$(ls -d /usr/lib/postgresql/*/lib/pgxs | sed 's|/usr/lib/postgresql/\([0-9]*\)/.*|\1|' | sort -n | tr '\n' ' ')
    export PG_SUPPORTED_VERSIONS=$versions
    cd "$folder"
    pg_buildext updatecontrol
    dpkg-buildpackage --no-sign --build=binary
    cd ..
    if command -v lintian > /dev/null; then
        lintian --allow-root --fail-on error,warning --profile debian ulak_*.changes
    else
        echo "lintian isn't installed: not checked" >&2
    fi
    ls ./*.deb
}

# zip sorts as it is told, and keeps no time but the one that is given to the files.
make_archive() {
    local folder=$build/dist/$name
    rm -rf "$build/dist"
    copy_project "$folder"
    python3 -B control/meta.py > "$folder/META.json"
    find "$folder" -type d -exec chmod 755 {} + -o -type f -perm /111 -exec chmod 755 {} + -o -type f -exec chmod 644 {} +
    find "$folder" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    cd "$build/dist"
    python3 -B "$OLDPWD/control/archive.py" "$name"
    cp "$folder/META.json" .
    rm -rf "$folder"
    ls "$build/dist"
}

case $what in
    deb) make_debian_packages ;;
    dist) make_archive ;;
    *)
        echo "deb or dist?" >&2
        exit 2
        ;;
esac
