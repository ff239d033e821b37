# shellcheck shell=sh
# $1: the root, $2: the session's own folder, which is old only where a clock was set, $3: minutes after which what
# another session left is removed, $4: what asks for the room that there is. Standard input: hashes that are wanted.
# Prints the room, size, time and name of every object, and hash and name of every wanted one.
mkdir -p -- "$1/objects" && cd -- "$1" || exit 1
find . -maxdepth 1 -name 'run-*' ! -name "$2" -mmin "+$3" -exec rm -rf {} +
cd objects || exit 1
eval "$4"
set --
while read -r name; do if [ -f "$name" ]; then set -- "$@" "$name"; fi; done
echo objects
find . -maxdepth 1 -type f -exec stat -c '%s %Y %n' {} +
echo hashes
if [ $# -gt 0 ]; then touch -c -- "$@"; sha256sum -- "$@"; fi
true
