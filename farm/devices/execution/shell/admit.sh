# shellcheck shell=sh disable=SC2086
# $1: folder of objects. Standard input: files of the current folder, each with its size, to check only that, or with -,
# to check that its name is its hash. Moves intact files to the folder of objects and prints their names.
objects=$1 names=
good=$({
    while read -r size name; do
        if [ "$size" = - ]; then names="$names $name"
        elif [ "$(stat -c %s -- "$name")" = "$size" ]; then echo "$name $name"; fi
    done
    if [ -n "$names" ]; then sha256sum -- $names; fi
} | while read -r hash name; do if [ "$hash" = "$name" ]; then echo "$name"; fi; done)
set -- $good
if [ $# -gt 0 ]; then mv -f -- "$@" "$objects/" && echo "$good"; fi
