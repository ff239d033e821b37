# shellcheck shell=sh disable=SC2086
# $1: the folder of objects; the others: files in the current folder that are hashed. Standard input: size and name of
# those that are only measured. Prints the names that are in `objects` now.
objects=$1; shift
good=$({
    if [ $# -gt 0 ]; then sha256sum -- "$@"; fi
    while read -r size name; do if [ "$(stat -c %s -- "$name")" = "$size" ]; then echo "$name $name"; fi; done
} | while read -r hash name; do if [ "$hash" = "$name" ]; then echo "$name"; fi; done)
set -- $good
if [ $# -gt 0 ]; then mv -f -- "$@" "$objects/" && echo "$good"; fi
