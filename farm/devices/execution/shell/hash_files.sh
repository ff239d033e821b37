# shellcheck shell=sh
# Runs in the folder. Standard input: names of files. Prints the target of a link, or the SHA-256 of a file, and the
# name.
set --
while read -r name; do
    if [ -L "$name" ]; then echo "$(readlink -- "$name") $name"; elif [ -f "$name" ]; then set -- "$@" "$name"; fi
done
if [ $# -gt 0 ]; then sha256sum -- "$@"; fi
true
