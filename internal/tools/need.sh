#!/bin/sh
# need.sh command... makes sure that the commands which the tests need are there, and installs those that are missing.
set -eu

as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

# package prints what the package of command $1 is called by package manager $2.
package() {
	case "$1:$2" in
	redis-server:brew) echo redis ;;
	initdb:apt) echo postgresql ;;
	initdb:brew) echo postgresql ;;
	gcc:apt) echo gcc libc6-dev ;; # without the headers gcc alone can't compile cgo, which the race detector needs
	*) echo "$1" ;;
	esac
}

# is_there looks in PATH, and where Debian hides PostgreSQL's commands.
is_there() {
	command -v "$1" >/dev/null || ls /usr/lib/postgresql/*/bin/"$1" >/dev/null 2>&1
}

missing=""
for command in "$@"; do
	is_there "$command" || missing="$missing $command"
done
[ -n "$missing" ] || exit 0

if command -v apt-get >/dev/null; then
	manager=apt
elif command -v brew >/dev/null; then
	manager=brew
else
	echo "need.sh: missing:$missing; install by hand: found neither apt-get nor brew" >&2
	exit 1
fi

packages=""
for command in $missing; do
	packages="$packages $(package "$command" "$manager")"
done
echo "need.sh: missing:$missing; installing with $manager:$packages"
# $packages is split into words on purpose.
if [ "$manager" = apt ]; then
	as_root apt-get update -q
	as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $packages
else
	brew install $packages
fi
