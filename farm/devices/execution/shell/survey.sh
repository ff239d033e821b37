# shellcheck shell=sh
# $1: root folder, $2: folder of this session, which is kept even if the clock was set, $3: minutes after which files of
# other sessions are removed, $4: command that prints the free space. Standard input: wanted hashes. Prints the free
# space; size, time and name of every object; hash and name of every wanted object.
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
